"""Bias corrections that give an update: which of them all tensors of a step, and all steps, allow.

Corrections are the same for all parameters, and follow from the number of a parameter's step alone. One that gives an
update therefore gives those of other tensors, and says by which number every other step is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moeverify.checks.step_findings import with_facts
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import NEAR, RIGHT, Changes, RecomputedFacts, StepChange, TermFacts

_ALIKE = 0.25
"""How far, relatively, the factors of two steps may be apart that are one rate: what 16 bits leave of an update."""

_NOISE = 4.0
"""Standard errors by which the factor of a step may be off besides."""

_SEEN = 2.0
"""How many times what is surely seen of a right update a correction must make of it, to be missed there."""

_STEP = "step"
"""The term of an update that is no decay."""


@dataclass(frozen=True)
class CorrectedSteps:
    """The steps of a run that were computed again, and what other bias corrections make of each.

    `factors` has by step, tensor and way how many times as large its update is, and `limits` by step and tensor the
    relative error from which on one is surely seen.
    """

    factors: Mapping[tuple[int, str], Mapping[StepChange, float]] = field(default_factory=dict)
    limits: Mapping[tuple[int, str], float] = field(default_factory=dict)

    def find_factor(self, changes: Changes, step: int, tensor: str) -> float | None:
        """Return by what a correction multiplies a step of a tensor, None where that is not known."""
        return self.factors.get((step, tensor), {}).get(changes[0])


NO_STEPS = CorrectedSteps()


def keep_common_corrections(findings: Sequence[Finding], steps: CorrectedSteps) -> list[Finding]:
    """Return the findings without corrections of moments that most tensors of a step, or other steps, do not have.

    A correction multiplies all of a step by one number. In 16 bits one of a dozen is near to many a number, so that a
    rate of its own in each layer looks like another correction in each. And two are one number in one step: what is
    left must explain all that was seen, or nothing of it is said.
    """
    updates = [finding for finding in findings if finding.kind == Kind.UPDATE]
    kept = {step: _list_kept(step, updates, steps) for step in {finding.step for finding in updates}}
    return [
        _keep_forms(finding, kept[finding.step])
        if _list_corrections(finding) and _tells(finding)
        else finding
        for finding in findings
    ]


def _list_kept(step: int, updates: Sequence[Finding], steps: CorrectedSteps) -> set[Changes]:
    """Return the corrections that less than half of a step's updates speak against."""
    of_step = [finding for finding in updates if finding.step == step and _tells(finding)]
    by_tensor: dict[str, dict[int, Finding]] = {}
    for finding in updates:
        by_tensor.setdefault(finding.tensor, {})[finding.step] = finding
    kept = set()
    for changes in set().union(*(_list_corrections(finding) for finding in of_step)):
        against = [
            finding
            for finding in of_step
            if not _is_so(changes, finding, steps)
            or _is_contradicted(changes, finding, by_tensor[finding.tensor], steps)
        ]
        if 2 * len(against) < len(of_step):
            kept.add(changes)
    return kept


def _is_so(changes: Changes, finding: Finding, steps: CorrectedSteps) -> bool:
    """Return whether a correction gives an update, with other changes or alone, or the number that it is off by."""
    return _is_tried(changes, finding) or _has_number(changes, finding, steps) is True


def _is_tried(changes: Changes, finding: Finding) -> bool:
    assert isinstance(finding.facts, RecomputedFacts)
    return any(set(changes) <= set(tried) for tried in finding.facts.tried)


def _has_number(changes: Changes, finding: Finding, steps: CorrectedSteps) -> bool | None:
    """Return whether an update is off by the number of a correction, None where one of both is not known."""
    wanted, term = steps.find_factor(changes, finding.step, finding.tensor), _find_step(finding)
    if wanted is None or term is None or term.factor is None:
        return None
    error = _NOISE * term.error / abs(term.expected)
    return abs(term.factor - wanted) <= NEAR * abs(wanted) + error


def _is_contradicted(
    changes: Changes, finding: Finding, others: Mapping[int, Finding], steps: CorrectedSteps
) -> bool:
    """Return whether a tensor is off otherwise in another step than by a correction, or right against it."""
    if not _list_corrections(finding):
        return False
    if any(_speaks_against(changes, finding, other, steps) for other in others.values()):
        return True
    if any(other.step != finding.step and _is_tried(changes, other) for other in others.values()):
        return False  # two numbers are no chance, and a counter may be wrong from some step on
    for step in {step for step, tensor in steps.factors if tensor == finding.tensor}.difference(others):
        wanted = steps.find_factor(changes, step, finding.tensor)
        limit = steps.limits.get((step, finding.tensor))
        if wanted is not None and limit is not None and abs(wanted - 1.0) > _SEEN * limit:
            return True
    return False


def _speaks_against(changes: Changes, finding: Finding, other: Finding, steps: CorrectedSteps) -> bool:
    if other.step == finding.step or not _tells(other) or _is_tried(changes, other):
        return False
    has_number = _has_number(changes, other, steps)
    if has_number is not None:
        return not has_number
    # Of a correction whose number is not known: one number in two steps is a rate.
    one, two = _find_step(finding), _find_step(other)
    found, number = (None if term is None else term.factor for term in (one, two))
    is_same = found is not None and number is not None and abs(found - number) <= _ALIKE * abs(found)
    return is_same or bool(_list_corrections(other))


def _find_step(finding: Finding) -> TermFacts | None:
    """Return the step of an update, where it is there by another factor than it should be."""
    assert isinstance(finding.facts, RecomputedFacts)
    return next((term for term in finding.facts.wrong_terms if term.name == _STEP), None)


def _tells(finding: Finding) -> bool:
    """Return whether an update says something of its corrections: no rate, dtype or rounding explains it."""
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts) or RIGHT in facts.tried:
        return False
    return not (facts.is_of_rate or facts.is_still or facts.is_rounding_sure)


def _list_corrections(finding: Finding) -> set[Changes]:
    """Return the formulas of an update, where all that is otherwise in each are corrections."""
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts) or finding.kind != Kind.UPDATE:
        return set()
    changes = set(facts.tried)
    return changes if all(len(each) == 1 and "correct" in each[0] for each in changes) else set()


def _keep_forms(finding: Finding, kept: set[Changes]) -> Finding:
    facts = finding.facts
    assert isinstance(facts, RecomputedFacts)
    variants = tuple(form for form in facts.variants if form.changes in kept)
    return with_facts(finding, variants=variants)

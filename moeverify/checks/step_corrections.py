"""Bias corrections that explain an update, restricted to those that all tensors and steps allow.

Corrections are the same for all parameters, and depend only on the step count of a parameter. A correction
that explains one update therefore explains the updates of other tensors, and predicts the factor of every
other step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moeverify.checks.step_findings import with_facts
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import NEAR, RIGHT, Changes, RecomputedFacts, StepChange, TermFacts

_ALIKE = 0.25
"""Relative difference up to which the factors of two steps count as one rate in 16-bit updates."""

_NOISE = 4.0
"""Additional allowed error of a step's factor, in standard errors."""

_SEEN = 2.0
"""Multiple of the detection limit above which a correction's effect on a right update cannot be missed."""

_STEP = "step"
"""The term of an update other than the decay."""


@dataclass(frozen=True)
class CorrectedSteps:
    """Recomputed steps of a run, and the effect of other bias corrections on each.

    `factors` maps (step, tensor) and variant to the factor of the update. `limits` maps (step, tensor) to
    the relative error above which an update is certainly detected.
    """

    factors: Mapping[tuple[int, str], Mapping[StepChange, float]] = field(default_factory=dict)
    limits: Mapping[tuple[int, str], float] = field(default_factory=dict)

    def find_factor(self, changes: Changes, step: int, tensor: str) -> float | None:
        """Return the factor of a correction for a tensor's step; None if unknown."""
        return self.factors.get((step, tensor), {}).get(changes[0])


NO_STEPS = CorrectedSteps()


def keep_common_corrections(findings: Sequence[Finding], steps: CorrectedSteps) -> list[Finding]:
    """Return the findings without corrections that most tensors of a step, or other steps, do not support.

    A correction multiplies a whole step by one number. In 16 bits one of a dozen corrections is close to
    many numbers. A separate rate per layer may therefore look like a separate correction per layer. Two
    corrections may also have the same number in one step. The remaining ones must explain all observations;
    otherwise none is reported.
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
    """Return the corrections contradicted by fewer than half of a step's updates."""
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
    """Return whether a correction explains an update, alone or with other changes, or matches its factor."""
    return _is_tried(changes, finding) or _has_number(changes, finding, steps) is True


def _is_tried(changes: Changes, finding: Finding) -> bool:
    assert isinstance(finding.facts, RecomputedFacts)
    return any(set(changes) <= set(tried) for tried in finding.facts.tried)


def _has_number(changes: Changes, finding: Finding, steps: CorrectedSteps) -> bool | None:
    """Return whether an update has the factor of a correction; None if either is unknown."""
    wanted, term = steps.find_factor(changes, finding.step, finding.tensor), _find_step(finding)
    if wanted is None or term is None or term.factor is None:
        return None
    error = _NOISE * term.error / abs(term.expected)
    return abs(term.factor - wanted) <= NEAR * abs(wanted) + error


def _is_contradicted(
    changes: Changes, finding: Finding, others: Mapping[int, Finding], steps: CorrectedSteps
) -> bool:
    """Return whether another step of the tensor contradicts a correction."""
    if not _list_corrections(finding):
        return False
    if any(_speaks_against(changes, finding, other, steps) for other in others.values()):
        return True
    if any(other.step != finding.step and _is_tried(changes, other) for other in others.values()):
        return False  # two matching numbers are no chance, and a counter may be wrong from some step on
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
    # The number of the correction is unknown. One number in two steps is a rate.
    one, two = _find_step(finding), _find_step(other)
    found, number = (None if term is None else term.factor for term in (one, two))
    is_same = found is not None and number is not None and abs(found - number) <= _ALIKE * abs(found)
    return is_same or bool(_list_corrections(other))


def _find_step(finding: Finding) -> TermFacts | None:
    """Return the step term of an update, if its factor is wrong."""
    assert isinstance(finding.facts, RecomputedFacts)
    return next((term for term in finding.facts.wrong_terms if term.name == _STEP), None)


def _tells(finding: Finding) -> bool:
    """Return whether an update is evidence for corrections: no rate, dtype or rounding explains it."""
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts) or RIGHT in facts.tried:
        return False
    return not (facts.is_of_rate or facts.is_still or facts.is_rounding_sure)


def _list_corrections(finding: Finding) -> set[Changes]:
    """Return the formulas of an update, if all their changes are corrections."""
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

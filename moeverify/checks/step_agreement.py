"""Numbers of an optimizer's formula are options, which all parameters share: what each tensor tells must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import Changes, RecomputedFacts, TermFacts

_AGREE = 1e-3
"""How far, relatively, the numbers of two tensors may be apart: what float32 leaves of a number in a few elements."""


_NOISE = 4.0
"""Standard errors by which two coefficients of one option may be apart besides."""

_ALIKE = 0.25
"""How far, relatively, the factors of two steps may be apart that are one rate: what 16 bits leave of an update."""

_STEP = "step"
"""The term of an update that is no decay."""


def keep_agreeing(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings without formulas whose number is another one in each tensor: these fit by chance.

    So does a coefficient of a moment's value before the step, which is a beta, where it is another one in each.
    """
    return _keep_agreeing_betas(_keep_common_corrections(_keep_agreeing_formulas(findings)))


def _keep_common_corrections(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings without corrections of moments, where those of two tensors have none in common.

    A correction multiplies all of a step by one number. In 16 bits one of a dozen is near to many a number, so that a
    rate of its own in each layer looks like another correction in each. Corrections depend on the step, too: one that
    does not give a later step, which is off by about the same number, is that number by chance.
    """
    by_step: dict[int, list[Finding]] = {}
    by_tensor: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.kind == Kind.UPDATE:
            by_tensor.setdefault(finding.tensor, []).append(finding)
        if _list_corrections(finding):
            by_step.setdefault(finding.step, []).append(finding)
    kept = {step: _list_kept(of_step, by_tensor) for step, of_step in by_step.items()}
    return [
        _keep_forms(finding, kept[finding.step]) if _list_corrections(finding) else finding
        for finding in findings
    ]


def _list_kept(findings: Sequence[Finding], by_tensor: Mapping[str, Sequence[Finding]]) -> set[Changes]:
    """Return the corrections of a step's updates that other tensors, and other steps, do not speak against."""
    tried = [_list_corrections(finding) for finding in findings]
    kept = set()
    for changes in set.union(*tried) if set.intersection(*tried) else ():
        having = [finding for finding, forms in zip(findings, tried, strict=True) if changes in forms]
        against = [each for each in having if _is_contradicted(changes, each, by_tensor[each.tensor])]
        if 2 * len(against) <= len(having):
            kept.add(changes)
    return kept


def _keep_forms(finding: Finding, kept: set[Changes]) -> Finding:
    facts = finding.facts
    assert isinstance(facts, RecomputedFacts)
    variants = tuple(form for form in facts.variants if form.changes in kept)
    return finding.model_copy(update={"facts": facts.model_copy(update={"variants": variants})})


def _is_contradicted(changes: Changes, finding: Finding, others: Sequence[Finding]) -> bool:
    """Return whether another step is off by about the same number, or by other corrections, and not by this one."""
    found = _find_step(finding)
    for other in others:
        if not isinstance(other.facts, RecomputedFacts) or changes in other.facts.tried:
            continue
        number = _find_step(other)
        is_same = found is not None and number is not None and abs(found - number) <= _ALIKE * abs(found)
        if is_same or _list_corrections(other):
            return True
    return False


def _find_step(finding: Finding) -> float | None:
    """Return by which factor the step of an update is there, where it is a wrong one."""
    terms = finding.facts.wrong_terms if isinstance(finding.facts, RecomputedFacts) else ()
    return next((term.factor for term in terms if term.name == _STEP), None)


def _list_corrections(finding: Finding) -> set[Changes]:
    """Return the formulas of an update, where all that is otherwise in each are corrections."""
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts) or finding.kind != Kind.UPDATE:
        return set()
    changes = set(facts.tried)
    return changes if all(len(each) == 1 and "correct" in each[0] for each in changes) else set()


def _keep_agreeing_formulas(findings: Sequence[Finding]) -> list[Finding]:
    numbers: dict[tuple[str, Changes], list[float]] = {}
    for finding in findings:
        if isinstance(finding.facts, RecomputedFacts):
            for form in finding.facts.variants:
                if form.number is not None:
                    numbers.setdefault((_name_result(finding), form.changes), []).append(form.number)
    scattered = {
        key for key, values in numbers.items() if max(values) - min(values) > _AGREE * max(map(abs, values))
    }
    return [_drop(finding, scattered) for finding in findings]


def _drop(finding: Finding, scattered: set[tuple[str, Changes]]) -> Finding:
    facts, result = finding.facts, _name_result(finding)
    if not isinstance(facts, RecomputedFacts):
        return finding
    kept = tuple(form for form in facts.variants if (result, form.changes) not in scattered)
    if len(kept) == len(facts.variants):
        return finding
    return finding.model_copy(update={"facts": facts.model_copy(update={"variants": kept})})


def _name_result(finding: Finding) -> str:
    """Return what the optimizer has made: an update, or which moment."""
    return "update" if finding.kind == Kind.UPDATE else finding.tensor.rpartition(".")[2]


def _keep_agreeing_betas(findings: Sequence[Finding]) -> list[Finding]:
    found: dict[str, list[TermFacts]] = {}
    for finding in findings:
        term = _find_beta(finding)
        if term is not None:
            found.setdefault(_name_result(finding), []).append(term)
    scattered = {result for result, terms in found.items() if not _are_alike(terms)}
    return [
        _forget_terms(finding)
        if _find_beta(finding) is not None and _name_result(finding) in scattered
        else finding
        for finding in findings
    ]


def _find_beta(finding: Finding) -> TermFacts | None:
    """Return the term of a moment's own value before the step where that alone explains what is wrong."""
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts) or facts.forms or finding.kind == Kind.UPDATE:
        return None
    off = [term for term in facts.terms if term.found is not None and term.found != term.expected]
    return off[0] if len(off) == 1 and off[0].name == _name_result(finding) else None


def _are_alike(terms: Sequence[TermFacts]) -> bool:
    found = [(term.found or 0.0, term.error) for term in terms]
    (least, one), (most, other) = min(found), max(found)
    return most - least <= _AGREE * abs(most) + _NOISE * (one + other)


def _forget_terms(finding: Finding) -> Finding:
    facts = finding.facts
    assert isinstance(facts, RecomputedFacts)
    terms = tuple(term.model_copy(update={"found": None, "error": 0.0}) for term in facts.terms)
    return finding.model_copy(update={"facts": facts.model_copy(update={"terms": terms})})

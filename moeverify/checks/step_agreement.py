"""Agreement between tensors on fitted numbers: all parameters share the options of an optimizer's formula."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.checks.step_corrections import NO_STEPS, CorrectedSteps, keep_common_corrections
from moeverify.checks.step_findings import forget_coefficients, result_of, with_facts
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import Changes, RecomputedFacts, TermFacts

_AGREE = 1e-3
"""Largest relative difference between the numbers of two tensors, fitted to a few float32 elements."""


_OF_PARAMETER = frozenset({"constant-in-gradient", "constant-for-decay"})
"""Variants whose number is not an option. It may differ between parameters, but not between steps."""

_NOISE = 4.0
"""Additional allowed difference of two coefficients of one option, in standard errors."""


def keep_agreeing(findings: Sequence[Finding], steps: CorrectedSteps = NO_STEPS) -> list[Finding]:
    """Return the findings without formulas that fit by chance.

    These are formulas whose number differs between tensors, and coefficients of a moment's previous value
    (a beta) that differ. Bias corrections are dropped if most tensors of a step do not have them, or if
    other `steps` contradict them.
    """
    return _keep_agreeing_betas(keep_common_corrections(_keep_agreeing_formulas(findings), steps))


def _keep_agreeing_formulas(findings: Sequence[Finding]) -> list[Finding]:
    numbers: dict[tuple[str, Changes], list[float]] = {}
    for finding in findings:
        if isinstance(finding.facts, RecomputedFacts):
            for form in finding.facts.variants:
                if form.number is not None:
                    numbers.setdefault((_name_scope(finding, form.changes), form.changes), []).append(
                        form.number
                    )
    scattered = {
        key for key, values in numbers.items() if max(values) - min(values) > _AGREE * max(map(abs, values))
    }
    return [_drop(finding, scattered) for finding in findings]


def _drop(finding: Finding, scattered: set[tuple[str, Changes]]) -> Finding:
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts):
        return finding
    kept = tuple(
        form for form in facts.variants if (_name_scope(finding, form.changes), form.changes) not in scattered
    )
    if len(kept) == len(facts.variants):
        return finding
    return with_facts(finding, variants=kept)


def _name_scope(finding: Finding, changes: Changes) -> str:
    """Return the scope of a formula's number: a result over all parameters, or both moments of one."""
    if _OF_PARAMETER.isdisjoint(changes):
        return result_of(finding)
    return f"moments of {finding.tensor.rpartition('.')[0]}"


def _keep_agreeing_betas(findings: Sequence[Finding]) -> list[Finding]:
    found: dict[str, list[TermFacts]] = {}
    for finding in findings:
        term = _find_beta(finding)
        if term is not None:
            found.setdefault(result_of(finding), []).append(term)
    scattered = {result for result, terms in found.items() if not _are_alike(terms)}
    return [
        with_facts(finding, terms=forget_coefficients(finding.facts))
        if isinstance(finding.facts, RecomputedFacts)
        and _find_beta(finding) is not None
        and result_of(finding) in scattered
        else finding
        for finding in findings
    ]


def _find_beta(finding: Finding) -> TermFacts | None:
    """Return the term of a moment's previous value, if it alone explains the error; else None."""
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts) or facts.forms or finding.kind == Kind.UPDATE:
        return None
    off = [term for term in facts.terms if term.found is not None and term.found != term.expected]
    return off[0] if len(off) == 1 and off[0].name == result_of(finding) else None


def _are_alike(terms: Sequence[TermFacts]) -> bool:
    found = [(term.found or 0.0, term.error) for term in terms]
    (least, one), (most, other) = min(found), max(found)
    return most - least <= _AGREE * abs(most) + _NOISE * (one + other)

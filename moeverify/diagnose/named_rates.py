"""Says what the factor of an optimizer's step is of the run's numbers: one over the root of a width, say."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.axes.groups import WEIGHT_COLUMNS, WEIGHT_ROWS
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.named_numbers import NamedNumbers, is_short, name_factor
from moeverify.results.checks import CheckName, Kind
from moeverify.results.factor import Factor, is_same
from moeverify.results.finding import Finding
from moeverify.results.step_facts import RecomputedFacts

_KNOWN, _WORST = 1e-8, 1e-4
"""Relative errors of a factor: the least that is allowed, and the largest with which one is named."""

_NOISE = 4.0
"""Standard errors that a coefficient may be off by."""

_MATRIX = 2


def name_rates(findings: Sequence[Finding], inputs: DiagnosisInputs) -> list[Finding]:
    """Return the findings, those of updates that are off by one factor with what that is of the run's numbers."""
    return [_name(finding, inputs) for finding in findings]


def _name(finding: Finding, inputs: DiagnosisInputs) -> Finding:
    facts = finding.facts
    if finding.follows or finding.check != CheckName.OPTIMIZER_STEP or finding.kind != Kind.UPDATE:
        return finding
    measured = _measure(facts) if isinstance(facts, RecomputedFacts) else None
    if measured is None or not isinstance(facts, RecomputedFacts):
        return finding
    value, error = measured
    fans = _list_fans(finding, facts, inputs)
    # The rate of a step is a schedule's, whose quotients are many a ratio of two sizes of the model by chance.
    numbers = NamedNumbers(fans) if facts.rate is not None else inputs.named.of(**fans)
    number = name_factor(value, numbers, error=error, first=tuple(fans))
    # A rate of a half, or a quarter, is seldom one over a width.
    return (
        finding
        if number is None or is_short(value) or is_short(1.0 / value)
        else finding.model_copy(update={"facts": _put(facts, number)})
    )


def _put(facts: RecomputedFacts, number: Factor) -> RecomputedFacts:
    return facts.model_copy(update={"number": number})


def _measure(facts: RecomputedFacts) -> tuple[float, float] | None:
    """Return the one factor of a rate, or of all terms that are off, and how far it may be off, relatively."""
    if (
        facts.is_still
        or facts.is_rounding_sure
        or facts.variants
        or facts.means
        or facts.is_unclipped
        or facts.schedule
    ):
        return None
    if facts.rate is not None:
        return (facts.rate / facts.scheduled, _KNOWN) if facts.rate > 0.0 < facts.scheduled else None
    wrong = facts.wrong_terms
    factors = [term.factor for term in wrong]
    first = factors[0] if factors else None
    if first is None or not first > 0.0 or any(each is None or not is_same(each, first) for each in factors):
        return None
    error = max(_NOISE * term.error / abs(term.found or 1.0) for term in wrong)
    return (first, max(error, _KNOWN)) if error <= _WORST else None


def _list_fans(finding: Finding, facts: RecomputedFacts, inputs: DiagnosisInputs) -> dict[str, float]:
    """Return the rows and columns of the tensors where all have the same."""
    shapes = {
        tuple(next(iter(inputs.regions[name].values())).shape[-2:])
        for name in (finding.tensor, *facts.others)
        if name in inputs.regions
    }
    if len(shapes) != 1 or len(shape := shapes.pop()) != _MATRIX:
        return {}
    return {WEIGHT_ROWS: shape[0], WEIGHT_COLUMNS: shape[1]}

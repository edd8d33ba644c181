"""Numbers of an optimizer's formula are options, which all parameters share: what each tensor tells must agree."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import RecomputedFacts

_AGREE = 1e-3
"""How far, relatively, the numbers of two tensors may be apart: what float32 leaves of a number in a few elements."""


def keep_agreeing(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings without formulas whose number is another one in each tensor: these fit by chance."""
    numbers: dict[tuple[str, str], list[float]] = {}
    for finding in findings:
        if isinstance(finding.facts, RecomputedFacts):
            for form, number in finding.facts.numbers.items():
                numbers.setdefault((_name_result(finding), form), []).append(number)
    scattered = {
        key for key, values in numbers.items() if max(values) - min(values) > _AGREE * max(map(abs, values))
    }
    return [_drop(finding, scattered) for finding in findings]


def _drop(finding: Finding, scattered: set[tuple[str, str]]) -> Finding:
    facts, result = finding.facts, _name_result(finding)
    if not isinstance(facts, RecomputedFacts) or not any(
        (result, form) in scattered for form in facts.numbers
    ):
        return finding
    kept = tuple(form for form in facts.variants if (result, form) not in scattered)
    numbers = {form: number for form, number in facts.numbers.items() if form in kept}
    return finding.model_copy(
        update={"facts": facts.model_copy(update={"variants": kept, "numbers": numbers})}
    )


def _name_result(finding: Finding) -> str:
    """Return what the optimizer has made: an update, or which moment."""
    return "update" if finding.kind == Kind.UPDATE else finding.tensor.rpartition(".")[2]

"""Names for wrong coefficients of an optimizer step, as products of its own options: 1, or 1/(1 - beta1).

A coefficient gets a name if exactly one product of options is within its error. If two products have about
the same length, neither is used. Options apply to all parameters and steps, so any tensor or step can
contradict a name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple, get_args

from moeverify.case.schema import Optimizer
from moeverify.checks.step_findings import forget_coefficients, name_result, result_of, with_facts
from moeverify.compare.assembled import Key
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import (
    AT_WEIGHT,
    UNDECAYED,
    Changes,
    Option,
    OptionNumber,
    OptionPower,
    RecomputedFacts,
    StepForm,
    TermFacts,
)

_NOISE, _EXACT, _WORST = 8.0, 1e-5, 1e-4
"""Standard errors, and relative errors: the precision of an option in float32, and the most for a name.

A less precise tensor must not contradict a name.
"""

_POWERS, _PLAIN_POWERS = (1.0, -1.0, 2.0, 0.5, -0.5, -2.0), (1.0, -1.0, 2.0)
_PLAIN: Collection[Option] = ("rate", "rate-of-options", "decay")
"""Options of which no formula takes a root."""

_LARGEST: Changes = ("largest",)
"""The maximum of a zero first moment looks like a missing share. Later steps decide."""

_MEAN, _SQUARE = ("exp_avg", "gradient"), ("exp_avg_sq", "squared gradient")
_MOMENTUM = ("momentum_buffer", "gradient")
_STARTS: Changes = ("starts-at-number",)
_CONSTANTS: Sequence[Changes] = (("constant-in-gradient",), ("constant-for-decay",))

_SAME = 1e-3
"""Relative difference up to which two numbers count as equal."""

_OWN: Mapping[str, Option] = {
    "exp_avg": "1-beta1",
    "exp_avg_sq": "1-beta2",
    "momentum_buffer": "momentum",
}
"""Preferred option of each moment, if several options have the value in its formula."""

Powers = tuple[OptionPower, ...]


class _Known(NamedTuple):
    """A product of options. `length` counts its written symbols."""

    value: float
    length: int
    powers: Powers


def name_coefficients(
    findings: Sequence[Finding],
    seen: Collection[Key],
    spec: Optimizer,
    rates: Sequence[float],
    precision: str,
) -> list[Finding]:
    """Return the findings with names for wrong coefficients, and without forms that later steps contradict.

    `seen` are the recomputed results, `rates` the learning rates by step. In 16 bits an option has three
    digits, which several products match, so none is named.
    """
    findings = [_drop_denied(finding, findings, seen) for finding in findings]
    findings = _join_decay(_drop_carried(_choose_starts(findings)))
    if precision == "bfloat16":
        return findings
    results: dict[tuple[str, str], list[tuple[int, TermFacts]]] = {}
    for finding in findings:
        for term in _list_wrong(finding):
            results.setdefault((result_of(finding), term.name), []).append((finding.step, term))
    named = {}
    scaled = _find_scaled_gradients(findings)
    for (result, name), terms in results.items():
        if (result, name) in scaled:
            continue
        found = _find_common(terms, spec, rates)
        if found is not None:
            expected = _find_expected(result, terms[0], spec, rates)
            wrong = {step for step, _ in terms}
            right = {step for step, kind, tensor in seen if name_result(kind, tensor) == result} - wrong
            steps = tuple(sorted(wrong)) if right else ()
            named[result, name] = OptionNumber(found=found, expected=expected, steps=steps)
    return [_put(finding, named) for finding in findings]


def _find_scaled_gradients(findings: Sequence[Finding]) -> Collection[tuple[str, str]]:
    """Return the terms explained by a scaled gradient: once in the mean, and squared in the second moment.

    With a single moment this requires that the factor or its inverse is an integer, such as a number of
    ranks.
    """
    factors: dict[tuple[str, str], float] = {}
    for finding in findings:
        for term in finding.facts.wrong_terms if isinstance(finding.facts, RecomputedFacts) else ():
            factors.setdefault((result_of(finding), term.name), term.factor or 0.0)
    if _MEAN in factors and _SQUARE in factors:
        is_scaled = math.isclose(factors[_MEAN] ** 2, factors[_SQUARE], rel_tol=_SAME)
        return (_MEAN, _SQUARE) if is_scaled else ()
    factor = factors.get(_MOMENTUM, 0.0)
    counts = (factor, 1.0 / factor) if factor > 0.0 else ()
    return (_MOMENTUM,) if any(abs(each - round(each)) <= _SAME * each for each in counts) else ()


def _drop_denied(finding: Finding, findings: Sequence[Finding], seen: Collection[Key]) -> Finding:
    """Drop the form "larger of two" from a moment's first step, if no later step has it."""
    facts, result = finding.facts, result_of(finding)
    if not isinstance(facts, RecomputedFacts) or _LARGEST not in facts.tried or finding.step:
        return finding
    later = [each for each in findings if result_of(each) == result and each.step > finding.step]
    if any(isinstance(each.facts, RecomputedFacts) and _LARGEST in each.facts.tried for each in later):
        return finding
    variants = tuple(form for form in facts.variants if form.changes != _LARGEST)
    return with_facts(finding, variants=variants)


def _drop_carried(findings: Sequence[Finding]) -> list[Finding]:
    """Drop the coefficients of a moment after an earlier step of it that no known formula explains.

    The moment contains the addend of that step. Multiples of it may explain later addends that are wrong in
    the same way.
    """
    unknown: dict[str, int] = {}
    for finding in sorted(findings, key=lambda each: each.step):
        if isinstance(finding.facts, RecomputedFacts) and not finding.facts.is_told:
            unknown.setdefault(finding.tensor, finding.step)
    return [
        _drop_coefficients(finding)
        if finding.kind == Kind.OPTIMIZER_STATE and finding.step > unknown.get(finding.tensor, finding.step)
        else finding
        for finding in findings
    ]


def _choose_starts(findings: Sequence[Finding]) -> list[Finding]:
    """Choose between a start value and a constant in a moment's first step: only a constant recurs later."""
    later = {
        (each.tensor, form)
        for each in findings
        if each.step and isinstance(each.facts, RecomputedFacts)
        for form in each.facts.tried
    }
    chosen = []
    for finding in findings:
        facts = finding.facts
        if isinstance(facts, RecomputedFacts) and not finding.step and _STARTS in facts.tried:
            constants = [form for form in facts.tried if form in _CONSTANTS]
            is_start = not any((finding.tensor, form) in later for form in constants)
            left_out = constants if is_start else [_STARTS]
            variants = tuple(form for form in facts.variants if form.changes not in left_out)
            chosen.append(with_facts(finding, variants=variants))
        else:
            chosen.append(finding)
    return chosen


def _join_decay(findings: Sequence[Finding]) -> list[Finding]:
    """Mark moments without decay as decayed at the weight, if their weight shows that: it is one mistake."""
    at_weight = {
        (each.step, each.tensor)
        for each in findings
        if isinstance(each.facts, RecomputedFacts) and each.facts.variant == AT_WEIGHT
    }
    return [
        with_facts(each, variants=(StepForm(changes=(*UNDECAYED, *AT_WEIGHT)),))
        if isinstance(each.facts, RecomputedFacts)
        and each.facts.variant == UNDECAYED
        and (each.step, each.tensor.rpartition(".")[0]) in at_weight
        else each
        for each in findings
    ]


def _drop_coefficients(finding: Finding) -> Finding:
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts):
        return finding
    terms = forget_coefficients(facts)
    return with_facts(finding, terms=terms, decay=None, share=None, means=(), number=None)


def _list_wrong(finding: Finding) -> Sequence[TermFacts]:
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts) or not facts.is_estimate:
        return ()
    return [term for term in facts.wrong_terms if term.found is not None and term.expected]


def _find_common(
    terms: Sequence[tuple[int, TermFacts]], spec: Optimizer, rates: Sequence[float]
) -> Powers | None:
    """Return the product that equals all these (step, term) coefficients, if no other is about as short."""
    if not any(_find_error(term) <= _WORST * abs(term.found or 0.0) for _, term in terms):
        return None
    fitting: dict[Powers, int] = {}
    for number, (step, term) in enumerate(terms):
        fits = {known.powers: known.length for known in _list_fitting(step, term, spec, rates)}
        fitting = fits if number == 0 else {key: fitting[key] for key in fitting if key in fits}
    if not fitting:
        return None
    shortest = min(fitting.values())
    short = [powers for powers, length in fitting.items() if length <= shortest + 1]
    return short[0] if len(short) == 1 else None


def _list_fitting(step: int, term: TermFacts, spec: Optimizer, rates: Sequence[float]) -> Iterator[_Known]:
    """Yield the products that a step's coefficient may be."""
    found = term.found or 0.0
    error = _find_error(term)
    if found * term.expected <= 0.0:
        return
    rate = rates[step] if step < len(rates) else spec.lr
    for known in _list_products(_list_options(spec, rate)):
        if abs(known.value - abs(found)) <= error:
            yield known


def _find_error(term: TermFacts) -> float:
    return max(_NOISE * term.error, _EXACT * abs(term.found or 0.0))


def _find_expected(
    result: str, of_step: tuple[int, TermFacts], spec: Optimizer, rates: Sequence[float]
) -> Powers:
    """Return the shortest product that a coefficient should be, preferably with the moment's own option."""
    step, term = of_step
    right = term.model_copy(update={"found": term.expected, "error": 0.0})
    own = _OWN.get(result)
    fitting = sorted(
        _list_fitting(step, right, spec, rates),
        key=lambda known: (known.length, own not in {each.option for each in known.powers}),
    )
    return fitting[0].powers if fitting else ()


def _list_options(spec: Optimizer, rate: float) -> Mapping[Option, float]:
    """Return the optimizer's options, without those that are 0 or 1 or that its kind lacks."""
    is_sgd = bool(spec.momentum) and spec.name == "sgd"
    values = {
        "beta1": 0.0 if is_sgd else spec.betas[0],
        "1-beta1": 0.0 if is_sgd else 1.0 - spec.betas[0],
        "beta2": 0.0 if is_sgd else spec.betas[1],
        "1-beta2": 0.0 if is_sgd else 1.0 - spec.betas[1],
        "momentum": spec.momentum if is_sgd else 0.0,
        "1-momentum": 1.0 - spec.momentum if is_sgd else 0.0,
        "rate": rate,
        "rate-of-options": 0.0 if math.isclose(rate, spec.lr) else spec.lr,
        "decay": spec.weight_decay,
    }
    return {name: values[name] for name in get_args(Option) if values[name] not in (0.0, 1.0)}


def _list_products(options: Mapping[Option, float]) -> Iterator[_Known]:
    """Yield products of at most two options: 1, an option, and its square, inverse and root."""
    yield _Known(1.0, 0, ())
    for option, value in options.items():
        for power in _PLAIN_POWERS if option in _PLAIN else _POWERS:
            yield _Known(value**power, _measure([power]), (OptionPower(option=option, power=power),))
    for (one, first), (other, second) in combinations(options.items(), 2):
        for powers in product((1.0, -1.0), repeat=2):
            value = first ** powers[0] * second ** powers[1]
            parts = tuple(
                OptionPower(option=name, power=power)
                for name, power in zip((one, other), powers, strict=True)
            )
            yield _Known(value, _measure(powers), parts)


def _measure(powers: Iterable[float]) -> int:
    return sum(1 + (power != 1.0) for power in powers)


def _put(finding: Finding, named: Mapping[tuple[str, str], OptionNumber]) -> Finding:
    facts, result = finding.facts, result_of(finding)
    wrong = {term.name for term in _list_wrong(finding)}
    if not isinstance(facts, RecomputedFacts) or not wrong:
        return finding
    terms = tuple(
        term.model_copy(update={"number": named.get((result, term.name))}) if term.name in wrong else term
        for term in facts.terms
    )
    return with_facts(finding, terms=terms)

"""Sentences about optimizer steps that were recomputed."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.numbers import format_count, format_ranks
from moeverify.report.words.factor import describe_sources
from moeverify.report.words.rates import describe_schedule
from moeverify.report.words.step_changes import describe_form
from moeverify.report.words.step_options import describe_number
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import (
    NEAR,
    DecayFacts,
    FactorMeaning,
    RecomputedFacts,
    ShareFacts,
    TermFacts,
)

Said = tuple[str, tuple[str, ...]]
"""The cause, and its evidence lines."""


def describe_recomputed(facts: RecomputedFacts, finding: Finding) -> Said:
    """Return how an optimizer result deviates from the expected formula, and the evidence."""
    cause, evidence = _describe(facts, finding)
    return (cause if facts.number is None else f"{cause}; {describe_sources(facts.number)}"), evidence


def _describe(facts: RecomputedFacts, finding: Finding) -> Said:
    quantity = "the update" if finding.kind == Kind.UPDATE else finding.tensor.rpartition(".")[2]
    wrong = facts.wrong_terms
    told = _describe_told(facts, finding, quantity)
    if told is not None:
        return told
    if not wrong:
        cause = f"{quantity} does not follow from the rank's own gradient, moments and options"
        return cause, _count_others(facts)
    if facts.is_still:
        return f"the optimizer's step leaves weights on {format_ranks(finding.ranks)} as they are", ()
    if facts.is_of_rate:
        return _describe_rate(facts, finding)
    factors = [term.factor for term in wrong if term.factor is not None]
    if len(wrong) == len(factors) > 1 and max(factors) - min(factors) < NEAR * max(map(abs, factors)):
        return _describe_whole(facts, factors[0], quantity)
    causes = [_describe_term(term, facts) for term in wrong]
    evidence = [
        f"{term.name}: coefficient {term.found:.6g}, and the options give {term.expected or 0.0:.6g}"
        for term in facts.terms
        if term.found is not None
    ]
    evidence += _count_others(facts)
    return f"the optimizer computes {quantity} otherwise: {', '.join(causes)}", tuple(evidence)


def _describe_term(term: TermFacts, facts: RecomputedFacts) -> str:
    """Return how the coefficient of a term deviates."""
    if term.factor is None:
        return f"{term.name} is there, and the options have none"
    if term.power_of_two is not None:
        return _describe_power(term, term.power_of_two)
    if abs(term.factor) < NEAR:
        return f"{term.name} is left out"
    if facts.lacks_clip(term):
        return f"the {term.name} is not clipped"
    if term.number is not None:
        return describe_number(term.name, term.number)
    return f"{term.name} counts {term.factor:.4g} times"


def _describe_whole(facts: RecomputedFacts, factor: float, quantity: str) -> Said:
    """Return that all terms deviate by one common factor."""
    how = (
        ""
        if quantity != "the update" or not 0.0 < factor < 1.0 or facts.number is not None
        else (f", as where {1.0 - factor:.4g} of the new weight is the old one")
    )
    evidence = "with that factor it is what the rank's own gradient, moments and options give"
    cause = f"the optimizer computes {quantity} otherwise: all of it counts {factor:.4g} times{how}"
    return cause, (evidence, *_count_others(facts))


def _describe_told(facts: RecomputedFacts, finding: Finding, quantity: str) -> Said | None:
    """Return the cause if one number, dtype or formula explains all elements, else None."""
    if facts.is_rounding_sure:
        what = "the weights hold" if finding.kind == Kind.UPDATE else f"{quantity} holds"
        cause = f"after the optimizer's step {what} only values that {facts.rounded_to} can represent"
        return cause, (f"each is what the right one is rounded to in {facts.rounded_to}",)
    if facts.variant is not None:
        return _describe_forms(facts, quantity)
    if facts.means and not facts.is_still:
        return _describe_means(facts, quantity)
    if facts.decay is not None:
        return _describe_decay(facts, facts.decay, quantity)
    if facts.share is not None:
        return _describe_share(facts, facts.share, quantity)
    # One number that explains the deviation is preferred over formulas that explain it equally well.
    return _describe_forms(facts, quantity) if facts.forms else None


def _describe_decay(facts: RecomputedFacts, decay: DecayFacts, quantity: str) -> Said:
    means = {
        "complement": ", which is 1 - beta",
        "bfloat16": ", which is that rounded to bfloat16",
        "float16": ", which is that rounded to float16",
        "other-beta": ", which is the other beta",
        "": "",
    }[decay.means]
    cause = (
        f"the optimizer computes {quantity} otherwise: "
        f"with a beta of {decay.found:.5g} in place of {decay.expected:.5g}{means}"
    )
    evidence = "with that beta it is what the rank's own gradient and moments give"
    return cause, (evidence, *_count_others(facts))


def _describe_share(facts: RecomputedFacts, share: ShareFacts, quantity: str) -> Said:
    if share.is_corrected:
        return _describe_corrected(facts, share, quantity)
    dampened = ", which is 1 - momentum, as with dampening" if share.is_dampened else ""
    cause = (
        f"the optimizer computes {quantity} otherwise: {' and '.join(share.terms)} "
        f"{'count' if len(share.terms) > 1 else 'counts'} {share.found:.4g} times{dampened}"
    )
    evidence = "with that factor it is what the rank's own gradient and moments give"
    return cause, (evidence, *_count_others(facts))


_MEANS: Mapping[FactorMeaning, str] = {
    "own-clip": "the gradient of each parameter is clipped by its own norm, not by that of all",
    "clip-of-shard": "each rank's shard of a gradient is clipped by its own norm, not by that of all gradients",
    "clip-of-rank": "the gradients of each rank are clipped by the norm of what the rank has, not by that of all",
    "clip-of-kind": "matrices and vectors are clipped apart, each by the norm of their own gradients",
    "clip-of-experts": "experts and all other parameters are clipped apart, each by the norm of their own gradients",
    "clipped-again": "the gradient is clipped twice",
    "unit-gradient": "the gradient of each parameter is divided by its own norm",
    "trust-ratio": "the step is multiplied by the norm of its parameter over its own, as by LAMB's trust ratio",
    "unit-step": "the step of each parameter is divided by its own norm",
    "unit-mean-square": "the step of each parameter is divided by the root of its own mean square",
    "norm-of-weight": "the step is multiplied by the norm of its parameter",
    "mean-square-of-weight": "the step is multiplied by the root mean square of its parameter, as by Adafactor",
}


def _describe_means(facts: RecomputedFacts, quantity: str) -> Said:
    first, *rest = (_MEANS[name] for name in facts.means)
    said = f"either {first}, or {', or '.join(rest)}: the numbers are equal here" if rest else first
    evidence = [f"{term.name} counts {term.factor:.6g} times" for term in facts.wrong_terms if term.factor]
    return f"the optimizer computes {quantity} otherwise: {said}", (*evidence, *_count_others(facts))


def _describe_corrected(facts: RecomputedFacts, share: ShareFacts, quantity: str) -> Said:
    way = "divided" if share.found > 1.0 else "multiplied"
    cause = (
        f"the optimizer computes {quantity} otherwise: it is {way} by its bias correction and kept so, "
        f"{share.found:.4g} times as large"
    )
    evidence = "with that factor it is what the rank's own gradient and moments give"
    return cause, (evidence, *_count_others(facts))


def _count_others(facts: RecomputedFacts) -> tuple[str, ...]:
    return (f"so it is in {format_count(len(facts.others), 'other tensor')}",) if facts.others else ()


def _describe_power(term: TermFacts, power: int) -> str:
    name, number = term.name.removeprefix("squared "), 2 ** abs(power)
    if power < 0:
        return f"the {name} is divided by {number}, as by a scale that the loss was not multiplied by"
    return f"the {name} is multiplied by {number}, as by a scale of the loss that is not undone"


def _describe_forms(facts: RecomputedFacts, quantity: str) -> Said:
    first, *rest = (describe_form(form) for form in facts.forms)
    evidence = [f"with that formula {quantity} is what the rank's own gradient, moments and options give"]
    if facts.others:
        evidence.append(f"so it is in {format_count(len(facts.others), 'other tensor')}")
    said = f"either {first}, or {', or '.join(rest)}: the numbers are equal here" if rest else first
    return f"the optimizer computes {quantity} otherwise: {said}", tuple(evidence)


def _describe_rate(facts: RecomputedFacts, finding: Finding) -> Said:
    evidence = ("with that rate the update is what the rank's own gradient, moments and options give",)
    if facts.schedule:
        cause = f"{describe_schedule(facts)}; in step {finding.step} the recipe gives {facts.scheduled:.6g}"
        return cause, evidence
    of_step = "" if facts.rate_step is None else f", as in step {facts.rate_step}"
    scheduled = f"the recipe gives {facts.scheduled:.6g}"
    cause = f"the learning rate of step {finding.step} is {facts.rate:.6g}{of_step}; {scheduled}"
    return cause, evidence

"""Sentences on steps of the optimizer that were computed again."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.numbers import format_count, format_ranks
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import (
    NEAR,
    DecayFacts,
    RecomputedFacts,
    ShareFacts,
    StepVariant,
    TermFacts,
)

Said = tuple[str, tuple[str, ...]]
"""The cause, and the evidence for it."""


def describe_recomputed(facts: RecomputedFacts, finding: Finding) -> Said:
    """Return how a result of the optimizer was made otherwise, as far as that is known, and what was seen."""
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
    causes = []
    for term in wrong:
        if term.factor is None:
            causes.append(f"{term.name} is there, and the options have none")
        elif term.power_of_two is not None:
            causes.append(_describe_power(term, term.power_of_two))
        elif abs(term.factor) < NEAR:
            causes.append(f"{term.name} is left out")
        elif facts.lacks_clip(term):
            causes.append(f"the {term.name} is not clipped")
        else:
            causes.append(f"{term.name} counts {term.factor:.4g} times")
    evidence = [
        f"{term.name}: coefficient {term.found:.6g}, and the options give {term.expected or 0.0:.6g}"
        for term in facts.terms
        if term.found is not None
    ]
    evidence += _count_others(facts)
    return f"the optimizer computes {quantity} otherwise: {', '.join(causes)}", tuple(evidence)


def _describe_told(facts: RecomputedFacts, finding: Finding, quantity: str) -> Said | None:
    """Return what one number, dtype or formula tells of all elements, None where none does."""
    if facts.is_rounding_sure:
        what = "the weights hold" if finding.kind == Kind.UPDATE else f"{quantity} holds"
        cause = f"after the optimizer's step {what} only values that {facts.rounded_to} can represent"
        return cause, (f"each is what the right one is rounded to in {facts.rounded_to}",)
    if facts.variant is not None:
        return _describe_variant(facts, facts.variant)
    if facts.decay is not None:
        return _describe_decay(facts, facts.decay, quantity)
    return None if facts.share is None else _describe_share(facts, facts.share, quantity)


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


_VARIANTS: Mapping[StepVariant, str] = {
    "epsilon-before-correction": "epsilon is added before the second moment's bias correction",
    "epsilon-in-root": "epsilon is added inside of the root",
    "no-epsilon": "epsilon is left out",
    "no-correction": "the moments' bias corrections are left out",
    "no-first-correction": "the first moment's bias correction is left out",
    "no-second-correction": "the second moment's bias correction is left out",
    "corrected-for-next-step": "the bias corrections are those of the next step",
    "corrected-for-step-before": "the bias corrections are those of the step before",
    "corrected-for-other-step": "the bias corrections are those of another step, by a counter that is not its own",
    "multiplied-by-corrections": "the moments are multiplied by their bias corrections, not divided by them",
    "corrected-with-bfloat16-betas": "the bias corrections are those of betas rounded to bfloat16",
    "corrected-with-swapped-betas": "the bias corrections are those of each other's beta",
    "decay-with-corrections": "the weight decay is multiplied by the moments' bias corrections",
    "decay-without-rate": "the weight decay is not multiplied by the learning rate",
    "decay-after-step": "the weight decay is taken from the weight after its step, not before it",
    "nesterov": "the momentum is Nesterov's",
}


def _describe_power(term: TermFacts, power: int) -> str:
    name, number = term.name.removeprefix("squared "), 2 ** abs(power)
    if power < 0:
        return f"the {name} is divided by {number}, as by a scale that the loss was not multiplied by"
    return f"the {name} is multiplied by {number}, as by a scale of the loss that is not undone"


def _describe_variant(facts: RecomputedFacts, variant: StepVariant) -> Said:
    evidence = ["with that formula the update is what the rank's own gradient, moments and options give"]
    if facts.others:
        evidence.append(f"so it is in {format_count(len(facts.others), 'other tensor')}")
    return f"the optimizer computes the update otherwise: {_VARIANTS[variant]}", tuple(evidence)


def _describe_rate(facts: RecomputedFacts, finding: Finding) -> Said:
    of_step = "" if facts.rate_step is None else f", as in step {facts.rate_step}"
    scheduled = f"the recipe gives {facts.scheduled:.6g}"
    cause = f"the learning rate of step {finding.step} is {facts.rate:.6g}{of_step}; {scheduled}"
    evidence = ("with that rate the update is what the rank's own gradient, moments and options give",)
    return cause, evidence

"""Sentences about optimizer steps that were recomputed."""

from __future__ import annotations

from moeverify.report.numbers import format_ranks
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import NEAR, RecomputedFacts, TermFacts

Said = tuple[str, tuple[str, ...]]
"""The cause, and its evidence lines."""


def describe_recomputed(facts: RecomputedFacts, finding: Finding) -> Said:
    """Return the deviation of an optimizer's result from the recomputed one, with evidence."""
    quantity = "the update" if finding.kind == Kind.UPDATE else finding.tensor.rpartition(".")[2]
    wrong = facts.wrong_terms
    if facts.is_rounding_sure:
        what = "the weights hold" if finding.kind == Kind.UPDATE else f"{quantity} holds"
        cause = f"after the optimizer's step {what} only values that {facts.rounded_to} can represent"
        return cause, (f"each value is the right value rounded to {facts.rounded_to}",)
    if not wrong:
        return f"{quantity} does not follow from the rank's own gradient, moments and options", ()
    if facts.is_still:
        return f"the optimizer's step does not change the weights on {format_ranks(finding.ranks)}", ()
    if facts.is_of_rate:
        return _describe_rate(facts, finding)
    factors = [term.factor for term in wrong if term.factor is not None]
    if len(wrong) == len(factors) > 1 and max(factors) - min(factors) < NEAR * max(map(abs, factors)):
        return _describe_whole(factors[0], quantity)
    causes = [_describe_term(term, facts) for term in wrong]
    evidence = [
        f"{term.name}: coefficient {term.found:.6g}, and the options give {term.expected or 0.0:.6g}"
        for term in facts.terms
        if term.found is not None
    ]
    return f"the optimizer computes {quantity} differently: {', '.join(causes)}", tuple(evidence)


def _describe_term(term: TermFacts, facts: RecomputedFacts) -> str:
    """Return the deviation of a term's coefficient."""
    if term.factor is None:
        return f"{term.name} is present, but not in the options"
    if term.power_of_two is not None:
        return _describe_power(term, term.power_of_two)
    if abs(term.factor) < NEAR:
        return f"{term.name} is left out"
    if facts.lacks_clip(term):
        return f"the {term.name} is not clipped"
    return f"{term.name} counts {term.factor:.4g} times"


def _describe_whole(factor: float, quantity: str) -> Said:
    """Return that all terms are multiplied by one factor."""
    is_share = quantity == "the update" and 0.0 < factor < 1.0
    how = f", as if the new weight kept {1.0 - factor:.4g} of the old one" if is_share else ""
    evidence = "with that factor it follows from the rank's own gradient, moments and options"
    cause = f"the optimizer multiplies {quantity} by {factor:.4g}{how}"
    return cause, (evidence,)


def _describe_power(term: TermFacts, power: int) -> str:
    name, number = term.name.removeprefix("squared "), 2 ** abs(power)
    if power < 0:
        return f"the {name} is divided by {number}, as if to undo a loss scale that was never applied"
    return f"the {name} is multiplied by {number}, as by a loss scale that is not undone"


def _describe_rate(facts: RecomputedFacts, finding: Finding) -> Said:
    evidence = ("with that rate the update follows from the rank's own gradient, moments and options",)
    of_step = "" if facts.rate_step is None else f", as in step {facts.rate_step}"
    scheduled = f"the recipe gives {facts.scheduled:.6g}"
    cause = f"the learning rate of step {finding.step} is {facts.rate:.6g}{of_step}; {scheduled}"
    return cause, evidence

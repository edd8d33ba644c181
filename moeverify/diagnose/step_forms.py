"""Groups the findings of one formula that an optimizer used for its results."""

from __future__ import annotations

from moeverify.checks.step_findings import result_of
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import AT_WEIGHT, NEAR, RIGHT, UNDECAYED, Changes, RecomputedFacts

_OF_ALL_STEPS = frozenset({"largest-square", "largest"})
"""Changes that make a result depend on several steps, so that one step does not show them."""

_DECAYS_IN_GRADIENT = "decay-in-gradient"
_DECAY = "weight decay"

DECAY_TIMES: Changes = ("decay-times",)
"""The square of a gradient that has its weight decay some other times, as the mean's coefficients tell."""


def is_of_form(finding: Finding, head: Finding) -> bool:
    """Return whether a result is made as the head's formula says, as far as it tells.

    A vector has no decay, and shows the other changes alone. Where the head's formula depends on earlier steps, a
    later one need not be explained.
    """
    facts, known = finding.facts, head.facts
    if not isinstance(facts, RecomputedFacts) or not isinstance(known, RecomputedFacts):
        return False
    if known.means:
        return is_of_means(facts, known) and _is_of_quantity(finding, head)
    if known.variant is None or known.variant in facts.tried:
        return known.variant is not None or (finding.step >= head.step and _is_of_decay(facts, known))
    changes = set(known.variant)
    if finding.kind == Kind.UPDATE and head.kind == Kind.OPTIMIZER_STATE:
        is_of_gradient = _DECAYS_IN_GRADIENT in changes and ("no-decay",) in facts.tried
        return is_of_gradient or (set(AT_WEIGHT) <= changes and AT_WEIGHT in facts.tried)
    is_undecayed = set(UNDECAYED) <= changes and UNDECAYED in facts.tried and finding.kind == head.kind
    if is_undecayed or not _is_of_result(finding, head):
        return is_undecayed  # of both moments
    # So few elements may be told nothing of a number.
    is_solved = known.forms[0].number is not None and finding.step >= head.step
    is_later = (is_solved or (changes & _OF_ALL_STEPS and finding.step > head.step)) and not facts.variants
    parts = [set(changes) for changes in facts.tried if changes != RIGHT]
    return bool(is_later) or any(part < changes for part in parts)


def _is_of_decay(facts: RecomputedFacts, known: RecomputedFacts) -> bool:
    """Return whether a moment has the square of a gradient with as many times the weight decay as the mean has."""
    wrong = known.wrong_terms
    if len(wrong) != 1 or wrong[0].name != _DECAY or not wrong[0].factor or known.forms:
        return False
    numbers = [form.number for form in facts.variants if form.changes == DECAY_TIMES]
    return any(
        number is not None and abs(number - wrong[0].factor) <= NEAR * abs(wrong[0].factor) + wrong[0].error
        for number in numbers
    )


def is_of_means(facts: RecomputedFacts, known: RecomputedFacts) -> bool:
    """Return whether a factor may be of the norms that another one is of.

    A framework may take the norm of several parameters that it keeps in one tensor, and such a factor is none that is
    known: a step that is only off by a factor is one of them.
    """
    if facts.means:
        return bool(set(facts.means) & set(known.means))
    wrong = facts.wrong_terms
    return (
        bool(wrong)
        and (facts.is_unclipped or not facts.variants)
        and facts.decay is None
        and facts.share is None
    )


def _is_of_quantity(finding: Finding, head: Finding) -> bool:
    """Return whether both are updates, or both moments, of one step or a later one than the head's."""
    return finding.kind == head.kind and finding.step >= head.step


def _is_of_result(finding: Finding, head: Finding) -> bool:
    return finding.kind == head.kind and result_of(finding) == result_of(head)

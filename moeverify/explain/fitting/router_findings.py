"""Router findings that name the rule of a choice or of weights, and the findings that follow from them."""

from __future__ import annotations

from collections.abc import Iterable

from moeverify.explain.fitting.families import module_of
from moeverify.results.cause import Cause
from moeverify.results.facts import RouterFacts
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered, Miscounted
from moeverify.verification.checks.router_rules import BEST

_OF_SCORES = frozenset(
    {"softmax-scores", "sigmoid-scores", "of-allowed", "other-temperature", "scores-again"}
)


def find_weighed(finding: Finding, heads: Iterable[Finding]) -> Finding | None:
    """Return the earlier finding of weights whose scores explain this choice; None for other findings."""
    facts = finding.facts
    if not isinstance(facts, RouterFacts) or facts.quantity != "choice":
        return None
    earlier = [each for each in heads if each.step <= finding.step]
    return next(
        (each for each in earlier if isinstance(each.facts, RouterFacts) and _changes_scores(each.facts)),
        None,
    )


def is_rounded(finding: Finding) -> bool:
    """Return whether a router's weights result from rounded scores, which also change its gradient."""
    return isinstance(finding.facts, RouterFacts) and bool(finding.facts.rounded)


def scores_otherwise(finding: Finding, loss: Finding) -> bool:
    """Return whether a router has wrong scores in the same step, which also enter the balance loss."""
    facts = finding.facts
    if not isinstance(facts, RouterFacts) or finding.step != loss.step:
        return False
    return _changes_scores(facts) and loss.tensor in (
        "balance",
        "total",
    )


def _changes_scores(facts: RouterFacts) -> bool:
    """Return whether the rule of a router, if unambiguous, changes the scores of all experts."""
    return facts.rule is not None and not facts.rivals and bool(_OF_SCORES & set(facts.rule.split("+")))


def tells_weights(origin: Finding, finding: Finding) -> bool:
    """Return whether the weight rule of a router explains an origin in the same module."""
    facts, explanation = finding.facts, origin.explanation
    if not isinstance(facts, RouterFacts) or explanation is None or origin.step != finding.step:
        return False
    is_known = facts.quantity == "weights" and facts.rule is not None and not facts.rivals
    return (
        is_known
        and isinstance(explanation.operation, Altered)
        and explanation.subject.module == finding.tensor
    )


def _tells_choice(finding: Finding) -> bool:
    """Return whether the choice rule of a router is known; its counts follow from the rule."""
    facts = finding.facts
    return isinstance(facts, RouterFacts) and facts.quantity == "choice" and facts.rule is not None


def is_made_by_choice(origin: Finding, finding: Finding) -> bool:
    """Return whether a router's known wrong choice explains an origin.

    The origin has wrong counts, or is a module that the router feeds. Such a module is compared as if the
    choices and their number were right, so it appears to differ when they are not.
    """
    explanation = origin.explanation
    if explanation is None or origin.step != finding.step or not _tells_choice(finding):
        return False
    if isinstance(explanation.operation, Miscounted):
        return True
    has_other_numbers = isinstance(finding.facts, RouterFacts) and (finding.facts.rule or "").startswith(BEST)
    if explanation.cause is not Cause.FORWARD or not (
        has_other_numbers or isinstance(explanation.operation, Altered)
    ):
        return False
    block = module_of(finding.tensor)
    place = explanation.subject.module or ""
    return bool(block) and place in (block, f"{block}.dispatcher")

"""Findings of checks that recompute results from a rank's own values, related to other findings.

Such a finding is a cause in itself, because the inputs of the result are given. One bug shows in many
tensors and steps, and usually also in the comparison with the golden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.facts import ClipFacts, RouterGradientFacts
from moeverify.results.finding import Finding
from moeverify.results.operation import (
    Altered,
    Carried,
    Scaled,
    Unmoved,
)
from moeverify.results.part import WHOLE
from moeverify.results.step_facts import RecomputedFacts
from moeverify.verification.checks.registry import KIND_ORDER
from moeverify.verification.checks.step_findings import result_of

RECOMPUTED: Mapping[str, frozenset[str]] = {
    CheckName.ROUTER: frozenset(
        {Kind.ROUTER_IDS, Kind.ROUTER_FLIPS, Kind.ROUTER_WEIGHTS, Kind.ROUTER_COUNTS}
    ),
    CheckName.CROSS_ENTROPY: frozenset({Kind.TOKEN_LOSS}),
    CheckName.OBJECTIVE: frozenset({Kind.LOSS}),
    CheckName.ROUTER_GRADIENT: frozenset({Kind.GRADIENT}),
    CheckName.GRADIENT_SUM: frozenset({Kind.GRADIENT}),
    CheckName.CLIP: frozenset({Kind.GRADIENT_NORM}),
    CheckName.OPTIMIZER_STEP: frozenset({Kind.UPDATE, Kind.OPTIMIZER_STATE}),
}
"""Kinds of logical tensors that each of these checks recomputes."""

LIKE = 0.05
"""Tolerance for equal factors in 16 bits, relative to the larger factor or to 1."""

_SCALARS = (
    CheckName.CLIP,
    CheckName.OBJECTIVE,
)  # their tensors are single numbers, each with its own bug


def join_alike(findings: Sequence[Finding]) -> list[Finding]:
    """Join recomputed findings of the same bug: all follow the worst finding of the first step.

    A wrong reported loss follows its wrong gradient: one formula makes both.
    """
    heads: dict[object, Finding] = {}
    recomputed = [finding for finding in findings if finding.check in RECOMPUTED]
    for finding in sorted(recomputed, key=_rank_head):
        if _find_head(finding, heads) is None:
            heads[_signature(finding)] = finding
    joined = []
    for each in findings:
        finding = each
        head = _find_head(finding, heads) if finding.check in RECOMPUTED else None
        if finding.check == CheckName.OBJECTIVE:
            gradients = [found for found in heads.values() if _is_gradient_of(found, finding)]
            head = gradients[0] if gradients else head
            if any(_is_unknown(found) and found.step == finding.step for found in heads.values()):
                finding = finding.model_copy(update={"code": Cause.FORWARD.value})
        elif _is_unknown(finding):
            head = _find_known(finding, heads.values()) or head
        is_led = head is not None and head is not each
        joined.append(finding.model_copy(update={"follows": head.tensor}) if head and is_led else finding)
    return joined


def _rank_head(finding: Finding) -> tuple[bool | int | float, ...]:
    """Return the sort key of heads: sure rounding first, updates last, by step and decreasing error."""
    return not _find_sure_dtype(finding), finding.kind == Kind.UPDATE, finding.step, -finding.error


def _is_unknown(finding: Finding) -> bool:
    """Return whether a finding only shows that the gradient of a router is wrong."""
    facts = finding.facts
    if not isinstance(facts, RouterGradientFacts):
        return False
    return facts.in_router and facts.term == "combine" and None in facts.factors.values()


def _find_known(unknown: Finding, heads: Iterable[Finding]) -> Finding | None:
    """Return a more specific finding of the step: a wrong term of a router's gradient, or a wrong loss."""
    found = [
        each
        for each in heads
        if each.step == unknown.step
        and each.check in (CheckName.ROUTER_GRADIENT, CheckName.OBJECTIVE)
        and not _is_unknown(each)
    ]
    return min(found, key=lambda each: each.check != CheckName.ROUTER_GRADIENT, default=None)


def _is_gradient_of(finding: Finding, loss: Finding) -> bool:
    """Return whether a finding is the gradient of a term of a wrong loss, in the same step."""
    facts = finding.facts
    if not isinstance(facts, RouterGradientFacts) or finding.step != loss.step:
        return False
    losses = {loss.tensor, *(loss.explanation.subject.tensors if loss.explanation is not None else ())}
    return "total" in losses or facts.term.partition(" ")[0] in losses


def merge_with_origins(
    origins: Sequence[Finding], recomputed: Sequence[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """Return both lists with one cause for each bug that both the golden and a recomputation detected.

    If the diagnosis explained an origin, it stays the cause and the recomputed finding follows it.
    Otherwise, the recomputed finding is the cause. This includes moments that look as if the step began
    with other state: if they do not follow from the rank's own previous moments, the step itself is wrong.
    """
    in_step = {finding.step for finding in recomputed if finding.kind == Kind.OPTIMIZER_STATE}
    explained = [
        origin
        for origin in origins
        if origin.explanation is not None
        and not (isinstance(origin.explanation.operation, Carried) and origin.step in in_step)
        and not _is_contradicted(origin, recomputed)
    ]
    known = list(recomputed)
    for number, finding in enumerate(known):
        same = [origin for origin in explained if _is_of_same(origin, finding)]
        if same and not finding.follows:
            known[number] = finding.model_copy(update={"follows": same[0].tensor})
    left = []
    for origin in origins:
        causes = [
            finding for finding in known if _is_of_same(origin, finding) or _comes_before(finding, origin)
        ]
        if origin not in explained and causes:
            begun = causes[0].follows or causes[0].tensor
            update = {"follows": begun, "unexplained": (), "explanation": None, "code": ""}
            left.append(origin.model_copy(update=update))
        else:
            left.append(origin)
    return left, known


def _is_contradicted(origin: Finding, recomputed: Sequence[Finding]) -> bool:
    """Return whether a recomputed finding is more specific than the explanation of an origin.

    This is the case in these situations:

    - A norm is off by a factor, and the ranks' own squares tell which parameters it miscounts.
    - An update or moment is off by a factor or by rounding, and the multiples of its terms are known.
    - A reported loss is wrong or computed by another formula, or gradients are wrong from a module on, and
      the gradient in the router identifies the error.
    - An update is zero, and the learning rate was too.
    - Counts of choices or a router's output are wrong, and the rule by which the router chooses or weighs
      is known.
    """
    explanation = origin.explanation
    if explanation is None:
        return False
    if isinstance(explanation.operation, Unmoved):
        return any(_tells_step(finding) and _is_of_same(origin, finding) for finding in recomputed)
    if explanation.cause in _SAYS_MORE:
        says_more = _SAYS_MORE[explanation.cause]
        return any(says_more(finding, origin) for finding in recomputed)
    telling = _list_telling(explanation, recomputed)
    if explanation.subject.quantity is Quantity.LOSS:
        return any(_is_gradient_of(finding, origin) for finding in telling)
    return explanation.cause is Cause.BACKWARD and any(
        isinstance(finding.facts, RouterGradientFacts)
        and finding.step == origin.step
        and finding.place is not None
        and finding.place.module.startswith(f"{explanation.subject.module}.")
        for finding in telling
    )


def _list_telling(explanation: Explanation, recomputed: Sequence[Finding]) -> list[Finding]:
    """Return the recomputed findings that may say more than a place."""
    if isinstance(explanation.operation, Altered):
        return [finding for finding in recomputed if finding.code != Cause.FORWARD]
    return []


def _tells_step(finding: Finding) -> bool:
    """Return whether a step used another learning rate that is known."""
    facts = finding.facts
    return isinstance(facts, RecomputedFacts) and facts.is_of_rate


def _tells_terms(finding: Finding, origin: Finding) -> bool:
    """Return whether an optimizer result is known to contain wrong multiples of its terms."""
    facts = finding.facts
    is_told = isinstance(facts, RecomputedFacts) and bool(facts.wrong_terms)
    return is_told and _is_of_same(origin, finding)


def _tells_parameters(finding: Finding, origin: Finding) -> bool:
    """Return whether the ranks' squares name the miscounted parameters of a scaled norm."""
    operation = origin.explanation.operation if origin.explanation is not None else None
    is_plain = isinstance(operation, Scaled) and all(each.part == WHOLE for each in operation.contributions)
    is_told = isinstance(finding.facts, ClipFacts) and finding.explanation is not None
    return is_plain and is_told and finding.step == origin.step


# By the cause of an origin: whether a recomputed finding says more about the same bug.
_SAYS_MORE: Mapping[Cause, Callable[[Finding, Finding], bool]] = {
    Cause.ROUNDING: _tells_terms,
    Cause.SCALE: _tells_terms,
    Cause.METRIC: _is_gradient_of,
    Cause.NORM: _tells_parameters,
}


def _comes_before(finding: Finding, origin: Finding) -> bool:
    """Return whether an earlier error in a router may have caused an origin."""
    if not isinstance(finding.facts, RouterGradientFacts) or finding.follows:
        return False
    after = (origin.step, KIND_ORDER.get(origin.kind, -1))
    return (finding.step, KIND_ORDER[finding.kind]) <= after or _is_contradicted(origin, [finding])


def _is_of_same(origin: Finding, finding: Finding) -> bool:
    """Return whether an origin has a kind that a finding recomputes, in the same step."""
    return origin.step == finding.step and origin.kind in RECOMPUTED.get(finding.check, ())


def _find_head(finding: Finding, heads: Mapping[object, Finding]) -> Finding | None:
    """Return the head with the signature of a finding, or with nearly the same factors."""
    head = heads.get(_signature(finding))
    if head is not None or not isinstance(finding.facts, RecomputedFacts):
        return head
    if finding.facts.rounded_to:  # the result did not change, and rounding explains that
        dtype = finding.facts.rounded_to
        return next((each for each in heads.values() if _find_sure_dtype(each) == dtype), None)
    if finding.kind == Kind.UPDATE and not finding.facts.wrong_terms:
        # Moments that were rounded only when stored, from some step on, made this update.
        moments = [each for each in heads.values() if _find_sure_dtype(each) and each.step <= finding.step]
        return next((each for each in moments if each.kind != Kind.UPDATE), None)
    return next((each for each in heads.values() if _has_like_factors(finding, each)), None)


def _find_sure_dtype(finding: Finding) -> str:
    """Return the narrower dtype to which a result was certainly rounded, or an empty string."""
    facts = finding.facts
    return facts.rounded_to if isinstance(facts, RecomputedFacts) and facts.is_rounding_sure else ""


def _has_like_factors(finding: Finding, head: Finding) -> bool:
    """Return whether two optimizer results have the same wrong terms with like factors."""
    one, other = finding.facts, head.facts
    if not isinstance(one, RecomputedFacts) or not isinstance(other, RecomputedFacts):
        return False
    if _name_result(finding) != _name_result(head):
        return False
    wrong, led = ({term.name: term.factor for term in facts.wrong_terms} for facts in (one, other))
    if not wrong or wrong.keys() != led.keys():
        return False
    return all(_is_like(factor, led[name]) for name, factor in wrong.items())


def _is_like(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= LIKE * max(abs(one), abs(other), 1.0)


def _name_result(finding: Finding) -> tuple[str, str]:
    """Return the check and its result: an update, or the name of a moment."""
    return finding.check, result_of(finding)


def _signature(finding: Finding) -> object:
    """Return a key that findings of one bug share: the quantity and the factors of its terms."""
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts):
        term = facts.term if isinstance(facts, RouterGradientFacts) else ""
        return finding.check, finding.kind, finding.tensor if finding.check in _SCALARS else term
    told = facts.rounded_to if facts.is_rounding_sure else "still" if facts.is_still else ""
    if facts.is_of_rate and not told:
        told = "rate"  # its factor changes from step to step
    if told:
        return *_name_result(finding), told
    factors = tuple(
        (term.name, term.is_wrong, None if term.factor is None else round(term.factor, 1))
        for term in facts.terms
    )
    return *_name_result(finding), factors

"""Findings of checks that compute a rank's results again from its own values: how they stand to other findings.

Such a finding is a cause by itself, since what the result was made of plays no part. One bug is seen in many tensors
and steps, and mostly by the comparison with the golden as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import RecomputedFacts
from moeverify.results.finding import Finding

RECOMPUTED: Mapping[str, frozenset[str]] = {
    CheckName.ROUTER: frozenset(
        {Kind.ROUTER_IDS, Kind.ROUTER_FLIPS, Kind.ROUTER_WEIGHTS, Kind.ROUTER_COUNTS}
    ),
    CheckName.OBJECTIVE: frozenset({Kind.LOSS}),
    CheckName.CLIP: frozenset({Kind.GRADIENT_NORM}),
    CheckName.OPTIMIZER_STEP: frozenset({Kind.UPDATE, Kind.OPTIMIZER_STATE}),
}
"""The kinds of logical tensors that each of these checks computes again."""

_SCALARS = (
    CheckName.CLIP,
    CheckName.OBJECTIVE,
)  # their tensors are single numbers, of which each is its own bug


def join_alike(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; of recomputed ones that are wrong alike, all follow from the first step's worst one."""
    heads: dict[object, Finding] = {}
    for finding in findings:
        if finding.check in RECOMPUTED:
            key = _signature(finding)
            best = heads.get(key)
            if best is None or (finding.step, -finding.error) < (best.step, -best.error):
                heads[key] = finding
    return [
        finding.model_copy(update={"follows": heads[_signature(finding)].tensor})
        if finding.check in RECOMPUTED and heads[_signature(finding)] is not finding
        else finding
        for finding in findings
    ]


def merge_with_origins(
    origins: Sequence[Finding], recomputed: Sequence[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """Return both lists with one cause for each bug that the golden and a recomputation have seen at once.

    What the diagnosis has explained by more than the rank's own values stays the cause, and the recomputed finding
    follows from it. Where it has not, the recomputed finding is the cause.
    """
    explained = [origin for origin in origins if origin.explanation is not None]
    known = list(recomputed)
    for number, finding in enumerate(known):
        same = [origin for origin in explained if _is_of_same(origin, finding)]
        if same and not finding.follows:
            known[number] = finding.model_copy(update={"follows": same[0].tensor})
    left = []
    for origin in origins:
        causes = [finding for finding in known if _is_of_same(origin, finding)]
        if origin.explanation is None and causes:
            begun = causes[0].follows or causes[0].tensor
            left.append(origin.model_copy(update={"follows": begun, "unexplained": ()}))
        else:
            left.append(origin)
    return left, known


def _is_of_same(origin: Finding, finding: Finding) -> bool:
    """Return whether an origin is about what a recomputed finding is about, in the same step."""
    return origin.step == finding.step and origin.kind in RECOMPUTED.get(finding.check, ())


def _signature(finding: Finding) -> object:
    """Return what is equal for findings of one bug: the quantity, and by which factors its terms are off."""
    facts = finding.facts
    if not isinstance(facts, RecomputedFacts):
        return finding.check, finding.kind, finding.tensor if finding.check in _SCALARS else ""
    quantity = finding.kind if finding.kind == Kind.UPDATE else finding.tensor.rpartition(".")[2]
    factors = tuple(
        (term.name, None if term.found is None else round(term.found / term.expected, 1))
        for term in facts.terms
    )
    return finding.check, quantity, factors

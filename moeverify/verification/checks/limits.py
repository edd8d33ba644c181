"""Detection limits: the smallest error that would have failed a comparison, over all checks of a tensor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from moeverify.results.decided import DECIDED_KINDS, DECIDED_LIMIT, count_decided
from moeverify.results.finding import MAX_CONCLUSIVE, CheckResult, DetectionLimits, Inconclusive
from moeverify.verification.checks.base import Check, CheckOutcome
from moeverify.verification.compare.assembled import Key


def apply_limits(outcomes: Sequence[tuple[Check[Any], CheckOutcome]]) -> tuple[CheckResult, ...]:
    """Return the results of the checks, each with its detection limits.

    A tensor is inconclusive if its comparison with the golden allows any error, and no other check
    recomputes it with a tighter bound. It counts only for the check that compares it with the golden.
    """
    best: dict[Key, float] = {}
    for _, outcome in outcomes:
        for key, limit in outcome.limits.items():
            best[key] = min(limit, best.get(key, limit))
    vanishing = frozenset[str]().union(*(outcome.vanishing for _, outcome in outcomes))
    return tuple(_complete(check, outcome, best, vanishing) for check, outcome in outcomes)


def _complete(
    check: Check[Any], outcome: CheckOutcome, best: dict[Key, float], vanishing: frozenset[str]
) -> CheckResult:
    if not outcome.limits:
        return outcome.result
    own = outcome.limits
    known = {key: best[key] for key in own}
    (_, _, worst_name), worst = max(known.items(), key=lambda item: item[1])
    limits = DetectionLimits(median=statistics.median(known.values()), worst=worst, tensor=worst_name)
    changes: dict[str, object] = {"limits": limits}
    if check.name in DECIDED_KINDS:
        counted = [best[key] for key in own if best[key] <= DECIDED_LIMIT or key[2] not in vanishing]
        changes["decided"] = count_decided(counted)
    if check.kinds:
        wide = [key for key, limit in own.items() if limit > MAX_CONCLUSIVE]
        left = [key for key in wide if best[key] > MAX_CONCLUSIVE]
        changes |= {
            "inconclusive": len(left),
            "recomputed": len(wide) - len(left),
            "inconclusive_tensors": tuple(
                Inconclusive(tensor=key[2], step=key[0], limit=best[key]) for key in left
            ),
        }
    return outcome.result.model_copy(update=changes)

"""Sentences about the smallest errors that the checks of a case detect."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeverify.report.numbers import format_count, format_number
from moeverify.results.decided import DECIDED_LIMIT
from moeverify.results.finding import CheckResult

_WIDE_LIMIT = 1e-4  # wider limits are reported: errors lost below them exceed the rounding of float32


def describe_inconclusive(check: CheckResult, most: float) -> str:
    """Return a note if a check could not conclusively verify some of its tensors, else an empty string.

    `most` is the relative bound above which a comparison is inconclusive.
    """
    if not check.inconclusive:
        return ""
    verb = "is" if check.inconclusive == 1 else "are"
    noun = format_count(check.inconclusive, f"{check.name} tensor")
    text = f"{noun} of {check.tensors} {verb} inconclusive: tolerance above {100 * most:.0f} %"
    if check.inconclusive_tensors:
        widest = max(check.inconclusive_tensors, key=lambda each: each.limit)
        text += f", up to {_percent(widest.limit)} ({widest.tensor}, step {widest.step})"
    return text


def describe_decided(check: CheckResult) -> str:
    """Return how many tensors of a check are decided, and the errors that would not have been seen."""
    counts = check.decided
    if counts is None:
        return ""
    text = (
        f"{check.name}: {counts.decided} of {counts.tensors} tensors decided at {100 * DECIDED_LIMIT:.0f} %"
    )
    if counts.decided == counts.tensors:
        return text
    which = "them" if counts.decided == 0 else "the others"
    if math.isinf(counts.limit):
        return f"{text}; no error would have been seen in {which}"
    widest = "" if math.isinf(counts.worst) else f", at most {_percent(counts.worst)}"
    return (
        f"{text}; in {which} an error below {_percent(counts.limit)} (median{widest}) may not have been seen"
    )


def describe_limits(checks: Sequence[CheckResult]) -> str:
    """Return the smallest relative errors that the checks can detect; empty if all limits are small.

    The limits of float64 cases are around 1e-10; a pass in float64 needs no note.
    """
    wide = [check for check in checks if check.limits is not None and check.limits.worst > _WIDE_LIMIT]
    if not wide:
        return ""
    parts = [
        f"{check.name} {_percent(check.limits.median)} / {_percent(check.limits.worst)}"
        for check in wide
        if check.limits is not None
    ]
    return f"smallest error of a tensor that is surely seen, median / worst: {', '.join(parts)}"


def _percent(share: float) -> str:
    return f"{format_number(100.0 * share)} %"

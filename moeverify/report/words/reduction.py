"""Sentences about wrong reductions, counts and placements."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.report.words.factor import name_products
from moeverify.results.explanation import Explanation
from moeverify.results.operation import (
    Miscounted,
    Misplaced,
)


def describe_miscounted(operation: Miscounted, explanation: Explanation) -> str:
    """Return how many choices of experts a rank counts, compared with the expected number."""
    count = len(explanation.subject.tensors)
    routers = f" of each of {count} routers" if count > 1 else ""
    if operation.actual == operation.expected:
        return (
            f"rank {operation.rank} counts {operation.actual:.0f} choices{routers}, as many as are expected, "
            "but not of the expected experts"
        )
    return (
        f"rank {operation.rank} counts {operation.actual:.0f} choices of experts{routers} where "
        f"{operation.expected:.0f} are expected"
        + (": those of padding, too" if operation.counts_padding else "")
    )


def describe_misplaced(operation: Misplaced, explanation: Explanation) -> str:
    """Return which parameters have a different shape than on one device, with their placement."""
    count = len(explanation.subject.tensors)
    names = explanation.subject.tensors[0] if count == 1 else f"{count} parameters"
    actual, expected = map(_format_shape, (operation.actual, operation.expected))
    sizes = f"the shape {actual} under this layout, {expected} on one device"
    first = "" if count == 1 else f" ({explanation.subject.tensors[0]})"
    if operation.dim is None:
        return f"{names} {'has' if count == 1 else 'have'} {sizes}{first}"
    over = f" over {name_products(operation.axes)}" if operation.axes else ""
    placed = f"placed as parts along dim {operation.dim}{over}, and every rank holds as much as the whole"
    return f"{names} {'is' if count == 1 else 'are'} {placed}: {sizes}{first}"


def _format_shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"

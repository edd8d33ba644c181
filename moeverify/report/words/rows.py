"""Words for what a module makes of the rows that one inside of it returns, and for elements that were lost."""

from __future__ import annotations

from moeverify.report.numbers import format_ranks
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.operation import LostElements, Reweighted


def describe_reweighted(operation: Reweighted, explanation: Explanation) -> str:
    """Return by which weights a module sums the rows that one inside of it returns."""
    module = explanation.subject.module
    is_backward = explanation.subject.quantity is Quantity.MODULE_GRADIENT
    rows = f"rows that {operation.rows} {'takes' if is_backward else 'returns'}"
    count = f"{operation.num_wrong} of the {operation.num_rows}"
    if is_backward and operation.way == "left-out":
        return f"{module} does not pass back the gradients of {count} {rows} (its output gradient matches)"
    if operation.way == "left-out":
        return f"{module} leaves out {count} {rows} (inputs match)"
    if operation.way == "of-others":
        return f"{module} sums rows of other tokens, or none, in the place of {count} {rows} (inputs match)"
    total = f"{operation.total or 0.0:.6g}"
    ways = {
        "scaled": f"{total} times the right weights",
        "normalized": f"weights that sum to {total} at each token, which those of one device do not",
        "exchanged": "the weights of other copies of the same tokens",
        "other": "other weights than one device",
    }
    if is_backward:
        return f"{module} sums the gradients of the {rows} by {ways[operation.way]} (its output gradient matches)"
    return f"{module} sums the {rows} by {ways[operation.way]} (inputs match)"


def describe_lost(operation: LostElements, subject: str) -> str:
    """Return how many elements of the shards of `subject` are zero, and where."""
    if operation.dim is not None:
        num_more = operation.num_slices - len(operation.slices)
        listed = ", ".join(map(str, operation.slices)) + (f" and {num_more} more" if num_more else "")
        noun, verb = ("slice", "is") if operation.num_slices == 1 else ("slices", "are")
        which = f"{noun} {listed} along dim {operation.dim} of {subject}"
        own = f", {', '.join(map(str, operation.own))} of its own part" if operation.own else ""
        return f"{which} {verb} zero on {format_ranks(operation.ranks)}{own}"
    which = (
        f"{'the last ' if operation.at_end else ''}{operation.num_lost} of {operation.num_elements} elements"
    )
    return f"{which} of a shard of {subject} are zero on {format_ranks(operation.ranks)}"

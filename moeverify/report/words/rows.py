"""Words for lost elements of shards."""

from __future__ import annotations

from moeverify.report.numbers import format_ranks
from moeverify.results.operation import LostElements


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

"""Sentences about values in the order of another layout."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.report.numbers import format_ranks
from moeverify.report.words.subject import Phrase, name_subject
from moeverify.results.explanation import Explanation
from moeverify.results.layout import (
    Dim,
    Order,
    Reordered,
)

_PLURALS = {"batch": "batch rows", "sequence": "positions"}
_NUMBERED = ("ranks", "chunks", "parts", "groups", "heads", "key-value heads", "experts")
_MOST_LISTED, _FEW = 8, 4


def describe_reordered(operation: Reordered, explanation: Explanation) -> str:
    """Return the layout in which correct values were read, or the order in which their parts are stored."""
    subject = name_subject(explanation.subject)
    texts = [_describe_order(order, subject) for order in operation.orders]
    text = f"{subject} {texts[0]}"
    if len(texts) > 1:
        text += "".join(f", or {each}" for each in texts[1:]) + ": the values are the same here"
    text += f", on {format_ranks(operation.ranks)} alone" if operation.ranks else ""
    numbers = ", ".join(map(str, operation.micro_batches))
    return text + (f", in micro-batch {numbers} alone" if numbers else "")


def _describe_order(order: Order, subject: Phrase) -> str:
    have, be = subject.pick("has", "have"), subject.be
    if order.way in ("stored", "read"):
        dims, right = _leave_out_fixed(order.dims, order.right)
        if order.way == "stored" and _is_interleaved(dims, right):
            parts = _name_blocks(right[0])
            return f"{have} {parts} interleaved element by element instead of one after the other"
        if order.way == "read" and _is_interleaved(dims, right):
            what = _PLURALS.get(right[1].name, right[1].name)
            parts = (
                f"{have} {'elements' if what == 'width' else what} dealt in turn to {_name_blocks(right[0])}"
            )
            return f"{parts}; each should have consecutive ones"
        stored, read = (dims, right) if order.way == "stored" else (right, dims)
        return f"{be} stored as {_name_dims(stored)} and read as {_name_dims(read)}"
    return f"{have} {_describe_turn(order)}"


def _describe_turn(order: Order) -> str:
    """Return the order of the parts along one dim."""
    (dim,) = order.dims
    at = order.right.index(dim) if dim in order.right else 0
    outer = order.right[at - 1] if at else None
    if outer is not None and outer.of is not None and dim.name in (outer.of, "width"):
        one = "elements" if dim.name == "width" else dim.name
        return f"within each of {outer.size} {_name_parts(outer)} {_describe_parts(order, one)}"
    return _describe_parts(order, _name_parts(dim))


def _describe_parts(order: Order, what: str) -> str:
    (dim,) = order.dims
    what = _PLURALS.get(what, what)
    size, number = dim.size, order.number
    if order.way == "same":
        return f"the values of {_name_one(dim, number)} in all {size} {what}"
    if size <= (_MOST_LISTED if dim.name in _NUMBERED or order.way != "rolled" else _FEW):
        places = list(range(size))
        half = [at for pair in zip(places[: size // 2], places[::-1], strict=False) for at in pair]
        listed = {
            "reversed": places[::-1],
            "rolled": places[-number:] + places[:-number],
            "zigzag": half,
            "out-of-zigzag": sorted(range(len(half)), key=half.__getitem__),
        }[order.way]
        return f"the {size} {what} in the order {', '.join(map(str, listed))}"
    if order.way == "reversed":
        return f"the {size} {what} in reverse order"
    if order.way == "rolled":
        moved = number if 2 * number <= size else number - size
        late = "late" if moved > 0 else "early"
        plural = "" if abs(moved) == 1 else "s"
        return f"the {size} {what} {abs(moved)} place{plural} too {late}, around the end"
    zigzag = "a zigzag" if order.way == "zigzag" else "an inverse zigzag"
    return f"the {size} {what} in the order of {zigzag}"


def _leave_out_fixed(dims: Sequence[Dim], right: Sequence[Dim]) -> tuple[Sequence[Dim], Sequence[Dim]]:
    """Return two orders of dims without their common prefix and suffix."""
    start, stop = 0, len(dims)
    while dims[start] == right[start]:
        start += 1
    while dims[stop - 1] == right[stop - 1]:
        stop -= 1
    return dims[start:stop], right[start:stop]


def _is_interleaved(dims: Sequence[Dim], right: Sequence[Dim]) -> bool:
    """Return whether the two swapped dims are a division of a dim into parts, and the part's contents."""
    return len(dims) == 2 and right[0].of is not None and right[1].name in (right[0].of, "width")


def _name_blocks(dim: Dim) -> str:
    return f"{dim.size} {_name_parts(dim)}"


def _name_dims(dims: Sequence[Dim]) -> str:
    return f"[{', '.join(f'{_name_parts(dim)} {dim.size}' for dim in dims)}]"


def _name_parts(dim: Dim) -> str:
    """Return the noun for the entries along a dim: `ranks of cp`, `chunks of the sequence`, `heads`."""
    if dim.name == "ranks":
        return f"ranks of {dim.axis}"
    if dim.name in ("chunks", "parts", "groups"):
        return f"{dim.name} of the {dim.of}"
    return dim.name


def _name_one(dim: Dim, number: int) -> str:
    """Return one entry along a dim, by its number."""
    if dim.name == "ranks":
        return f"rank {number} of {dim.axis}"
    return f"number {number}"

"""Operators that move elements: the sources of the elements, their index, and the elements that it chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.joint import At
from moeverify.explain.program import Op, Ref

_INDICES = {
    "index": (1,),
    "index_put": (1,),
    "index_select": (2,),
    "index_copy": (2,),
    "gather": (2,),
    "scatter": (2,),
    "take": (1,),
    "embedding": (1,),
    "where": (0,),
    "masked_fill": (1,),
    "masked_select": (1,),
    "masked_scatter": (1,),
}
"""Arguments of moves that choose elements and are not moved."""


def number_sources(alignment: Alignment, at: At) -> tuple[dict[At, int], Tensor | None]:
    """Return the sources of a moved value, and the numbers of its elements in the shape of the value.

    Elements of a source are numbered from 1 above its start, which the first result has. Padding is 0. No numbers
    are known of a value that its operator does not move.
    """
    joint = alignment.joint
    maker = joint.maker(at)
    chosen = list_indices(joint.op(maker))
    starts: dict[At, int] = {}
    size = 0
    for source in joint.sources(maker):  # the memory that it overwrites, too
        starts[source] = size
        size += math.prod(joint.value(source).shape)

    def number(source: At) -> Tensor | None:
        data = alignment.data(source)
        if data is None or (source[0] == at[0] and source[1] in chosen):
            return data
        first = starts[source] + 1
        return torch.arange(first, first + data.numel(), dtype=torch.float64).reshape(data.shape)

    return starts, alignment.move(at, number)


def find_chosen(op: Op) -> tuple[int, int, int] | None:
    """Return (source, index, dim) of an operator that takes elements of a value by one index, or None."""
    args = op.args
    if op.short == "embedding" and isinstance(args[0], Ref) and isinstance(args[1], Ref):
        return args[0].number, args[1].number, 0
    if op.short in ("index_select", "gather") and isinstance(args[0], Ref) and isinstance(args[2], Ref):
        return args[0].number, args[2].number, args[1]
    if op.short == "index" and isinstance(args[0], Ref):
        given = [(dim, each.number) for dim, each in enumerate(args[1]) if isinstance(each, Ref)]
        return (args[0].number, given[0][1], given[0][0]) if len(given) == 1 else None
    return None


def list_columns(op: Op, data: Tensor, chosen: Tensor, dim: int, shape: Sequence[int]) -> Tensor | None:
    """Return the flat places, in the result, of the elements that each index chooses: (indices, elements of each)."""
    places = torch.arange(math.prod(shape)).reshape(tuple(shape))
    if op.short == "gather":
        return places.reshape(-1, 1) if tuple(shape) == tuple(chosen.shape) else None
    if tuple(shape) != (*data.shape[:dim], *chosen.shape, *data.shape[dim + 1 :]) or not chosen.numel():
        return None
    dims = list(range(dim, dim + chosen.ndim))
    return places.movedim(dims, list(range(len(dims)))).reshape(chosen.numel(), -1)


def list_rows_of(op: Op, data: Tensor, dim: int, chosen: Tensor) -> Tensor:
    """Return the elements that an index may choose: (indices or 1, choices, elements of each)."""
    if op.short != "gather":
        return data.movedim(dim, 0).reshape(1, data.shape[dim], -1)
    inside = tuple(slice(None) if at == dim else slice(size) for at, size in enumerate(chosen.shape))
    rows = data[inside].movedim(dim, -1).unsqueeze(dim)  # one row of choices for each index
    rows = rows.expand(*chosen.shape, data.shape[dim])
    return rows.reshape(chosen.numel(), -1, 1)


def list_indices(op: Op) -> frozenset[int]:
    """Return the numbers of the values that choose elements and are not moved."""
    found: set[int] = set()
    for place in _INDICES.get(op.short.rstrip("_"), ()):
        argument = op.args[place] if place < len(op.args) else None
        found |= {each.number for each in _as_list(argument) if isinstance(each, Ref)}
    return frozenset(found)


def _as_list(argument: object) -> Sequence[object]:
    return argument if isinstance(argument, list | tuple) else [argument]

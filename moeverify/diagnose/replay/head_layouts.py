"""Heads that attention takes, or their gradient, read in another layout on their way between ranks.

A rank has the heads of its chunk as (B, s, N, D), of all rows that are known here: where ranks divide the rows too,
none of this fits. Letters: n ranks of a context group, B rows, s tokens of a chunk, N heads, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.results.change import Change

PART, GRADIENT = "layout", "gradient-layout"
TAKEN = ("queries", "keys", "values", "all")

_WAYS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sequence-first": lambda x: x.transpose(0, 1).reshape(x.shape),
    "batch-first": lambda x: x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1),
    "heads-first": lambda x: x.transpose(1, 2).reshape(x.shape),
    "heads-last": lambda x: x.reshape(x.shape[0], x.shape[2], x.shape[1], -1).transpose(1, 2),
    "width-first": lambda x: x.transpose(2, 3).reshape(x.shape),
    "width-last": lambda x: x.reshape(*x.shape[:2], x.shape[3], x.shape[2]).transpose(2, 3),
}
"""What each rank makes of its own chunk (B, s, N, D)."""

_GATHERED: Mapping[str, Callable[[Tensor], Tensor]] = {
    # (n, B, s, ...) is read as (B, n, s, ...).
    "ranks-first": lambda x: x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1),
    "ranks-last": lambda x: x.transpose(0, 1).reshape(x.shape),
    "ranks-reversed": lambda x: x.flip(0),
}
"""What is made of the chunks of all ranks, (n, B, s, N, D)."""


def list_layouts(shape: Sequence[int], num_ranks: int) -> list[Change]:
    """Return in which layouts queries, keys, values or all of these, (B, S, N, D), may be read."""
    found = [Change(part=PART, way=way, name=name) for way in _list_ways(shape, num_ranks) for name in TAKEN]
    # Of two ranks the reverse order of keys or values is that of the next rank, which is a way of its own.
    return [
        each for each in found if each.way != "ranks-reversed" or num_ranks > 2 or each.name not in TAKEN[1:3]
    ]


def list_gradient_layouts(shape: Sequence[int], num_ranks: int) -> list[Change]:
    """Return in which layouts the gradient of what heads put out, (B, S, N, D), may be read."""
    return [Change(part=GRADIENT, way=way) for way in _list_ways(shape, num_ranks)]


def _list_ways(shape: Sequence[int], num_ranks: int) -> list[str]:
    """Return the ways; of two that are one the other way round, one where the dims have one size."""
    rows, length, heads, width = shape
    sizes = {"batch-first": (rows, length // num_ranks), "heads-last": (length // num_ranks, heads)}
    sizes |= {"width-last": (heads, width), "ranks-last": (num_ranks, rows)}
    ways = [*_WAYS, *(_GATHERED if num_ranks > 1 else ())]
    return [way for way in ways if way not in sizes or sizes[way][0] != sizes[way][1]]


def takes(change: Change | None, what: str) -> bool:
    """Return whether a change is of queries, keys or values."""
    return change is not None and change.name in (what, "all")


def relay(x: Tensor, way: str, positions: Sequence[Sequence[int]]) -> Tensor:
    """Return heads (B, S, N, D) as they are read; `positions` are those of each rank, in its order."""
    chunks = torch.stack([x[:, list(part)] for part in positions])
    turned = (
        _GATHERED[way](chunks) if way in _GATHERED else torch.stack([_WAYS[way](each) for each in chunks])
    )
    found = torch.empty_like(x)
    for part, chunk in zip(positions, turned, strict=True):
        found[:, list(part)] = chunk
    return found

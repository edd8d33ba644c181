"""Correct values in wrong positions: memory layouts of a tensor."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record

DimName = Literal[
    "batch",
    "sequence",
    "features",
    "heads",
    "key-value heads",
    "experts",
    "ranks",
    "chunks",
    "parts",
    "groups",
    "rows",
    "columns",
    "width",
]
"""The meaning of a dim. `features` are all features of a token; `chunks` are parts of the sequence."""

OrderWay = Literal["stored", "read", "reversed", "rolled", "same", "zigzag", "out-of-zigzag"]


Scope = Literal["rank", "group", "whole"]
"""The unit that is laid out: the shard of each rank, the shards of an axis together, or the whole tensor."""


class Dim(Record):
    """One dim of a layout.

    `axis` is the mesh axis if the dim is `ranks`. `of` is the dim that is split into these parts, or None.
    """

    name: DimName
    size: int
    axis: str = ""
    of: DimName | None = None


class Order(Record):
    """The order in which values are stored that should be in the dims `right`.

    With `stored`, they are stored in the order `dims` and read as `right`. With `read`, they are stored as
    `right` and read as `dims`. All other ways concern the parts along the single dim of `dims`. These are
    `reversed`, `rolled` by `number`, all the `same` part, in zigzag order, or in the inverse of that order.
    """

    way: OrderWay
    dims: tuple[Dim, ...]
    right: tuple[Dim, ...]
    number: int = 0


class Reordered(Record):
    """Correct values in the order of another layout, within `scope`.

    `orders` are the orders that explain the values, the simplest first; all of them give the same values
    here. `ranks` and `micro_batches`, if given, are the only affected ones.
    """

    kind: Literal["reordered"] = "reordered"
    scope: Scope
    orders: tuple[Order, ...]
    ranks: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()

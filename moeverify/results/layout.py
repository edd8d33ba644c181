"""Right values in other places: the layouts of a tensor in memory."""

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
"""What runs along a dim. `features` are all of a token's; `chunks` are parts of the sequence."""

OrderWay = Literal["stored", "read", "reversed", "rolled", "same", "zigzag", "out-of-zigzag"]


Scope = Literal["rank", "group", "whole"]
"""What is laid out as one: what each rank has, what the ranks of an axis have together, or the whole tensor."""


class Dim(Record):
    """One dim of a layout; `axis` is that of `ranks`, `of` the dim of which these are parts, if any."""

    name: DimName
    size: int
    axis: str = ""
    of: DimName | None = None


class Order(Record):
    """In which order the values stand that belong into the dims `right`.

    They are `stored` with the dims in the order of `dims`, and read in that of `right`; or stored as `right` and
    `read` as `dims`. Or the parts along the one dim of `dims` are `reversed`, `rolled` by `number`, all the `same`
    one, or in the order of a zigzag or of what undoes one.
    """

    way: OrderWay
    dims: tuple[Dim, ...]
    right: tuple[Dim, ...]
    number: int = 0


class Reordered(Record):
    """The right values stand in the order of another layout of what `scope` says.

    `orders` are those that explain it, the simplest first; others give the same values here. With `ranks`, or
    `micro_batches`, it is so in these alone.
    """

    kind: Literal["reordered"] = "reordered"
    scope: Scope
    orders: tuple[Order, ...]
    ranks: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()

"""Right values in other places: the layouts of a tensor in memory, and the tokens that have those of others."""

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
    "micro-batches",
    "chunks",
    "parts",
    "groups",
    "rows",
    "columns",
    "width",
]
"""What runs along a dim. `features` are all of a token's; `chunks` are parts of the sequence."""

OrderWay = Literal["stored", "read", "reversed", "rolled", "same", "before", "zigzag", "out-of-zigzag"]


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
    one, each that `before` it, or in the order of a zigzag or of what undoes one.
    """

    way: OrderWay
    dims: tuple[Dim, ...]
    right: tuple[Dim, ...]
    number: int = 0


class Span(Record):
    """Indices from `start` to before `stop`."""

    start: int
    stop: int


class TokenPlaces(Record):
    """Which tokens are meant: those at `rows` and `positions` of `ranks` and `micro_batches`; of none given, all.

    These are places in what a rank has of a micro-batch, `size` tokens of one after another where they are `flat`, or
    with `in_batch` those of the batch. Empty ones are no restriction.
    """

    ranks: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    rows: tuple[Span, ...] = ()
    positions: tuple[Span, ...] = ()
    flat: tuple[Span, ...] = ()
    size: tuple[int, int] = (0, 0)
    in_batch: bool = False


class Run(Record):
    """Tokens of one row of the batch from `start` to before `stop`, whose values are those of others.

    The first has those of `source` (row, position), and each one after it those `step` positions further.
    """

    row: int
    start: int
    stop: int
    source: tuple[int, int]
    step: int = 1


class RankSource(Record):
    """A rank that has what belongs to another, at the same places of its part."""

    rank: int
    source: int


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


class TokenValues(Record):
    """Tokens of what a module puts out, or of its gradient, have other values; all others are right.

    They have those of other tokens (`moved`), those besides their own (`added`), none (`zero`) or their own `twice`.
    `places` says which tokens, None where that takes long. `of_ranks` says of which rank each has what belongs to the
    same places there, `offset` how many rows and positions further on in its own part a rank has them right. `runs`
    has the first of `num_runs`.
    """

    kind: Literal["token-values"] = "token-values"
    way: Literal["moved", "zero", "twice", "added"]
    num_tokens: int
    places: TokenPlaces | None = None
    of_ranks: tuple[RankSource, ...] = ()
    offset: tuple[int, int] | None = None
    runs: tuple[Run, ...] = ()
    num_runs: int = 0

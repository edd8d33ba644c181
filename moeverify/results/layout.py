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


class Served(Record):
    """`num_rows` of the `num_all` rows of an expert that come back from another one, `by`; -1 where they are zero.

    With `of_others` they are rows of other tokens.
    """

    expert: int
    by: int
    of_others: bool
    num_rows: int
    num_all: int


class TakenCounts(Record):
    """By which counts the experts of a rank take its rows, which are sorted by expert: others than the right ones.

    The rows of one of its experts, the first whose count is another one, end at `end` and not at `right_end`. Where
    the counts are the right ones in another `order`, it has for each expert that whose count it gets; where they are
    those of another micro-batch, that is `micro_batch`.
    """

    rank: int
    expert: int
    end: int
    right_end: int
    order: tuple[int, ...] = ()
    micro_batch: int | None = None


LostWay = Literal[
    "all", "all-but-first", "all-but-last", "first", "last", "all-but-first-of-token", "all-but-last-of-token"
]
CopyOrder = Literal["tokens", "experts"]


class LostCopies(Record):
    """Which copies of its tokens each rank gets zeros back for: `number` of them, or all but so many, in an order.

    Or all but one of each token: the first or last of its choices, or of its experts by their numbers.
    """

    way: LostWay
    number: int = 0
    order: CopyOrder = "tokens"


class OtherRows(Record):
    """`num_wrong` of `num_rows` rows that experts return for copies of tokens are other rows.

    `served` has the most frequent kinds, and `num_more` are of other kinds. `counts` says by which counts experts
    take rows, where these are all that is wrong, and `offset` how many places before its own each row stands. Where
    nothing comes back for any of them, `are_lost`; `lost` says which these are.
    """

    kind: Literal["other-rows"] = "other-rows"
    num_wrong: int
    num_rows: int
    served: tuple[Served, ...]
    num_more: int = 0
    counts: TakenCounts | None = None
    offset: int | None = None
    are_lost: bool = False
    lost: LostCopies | None = None

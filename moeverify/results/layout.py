"""Correct values in wrong positions: memory layouts of a tensor, and tokens with values of other tokens."""

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
"""The meaning of a dim. `features` are all features of a token; `chunks` are parts of the sequence."""

OrderWay = Literal["stored", "read", "reversed", "rolled", "same", "before", "zigzag", "out-of-zigzag"]


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
    `reversed`, `rolled` by `number`, all the `same` part, each the part `before` it, in zigzag order, or in
    the inverse of that order.
    """

    way: OrderWay
    dims: tuple[Dim, ...]
    right: tuple[Dim, ...]
    number: int = 0


class Span(Record):
    """Indices from `start` up to but excluding `stop`."""

    start: int
    stop: int


class TokenPlaces(Record):
    """A set of tokens: all tokens that every nonempty field selects.

    `rows` and `positions` are within the local micro-batch of a rank, or within the batch with `in_batch`.
    `size` is that range as (rows, positions). `flat` are indices into the flattened tokens of that range.
    """

    ranks: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    rows: tuple[Span, ...] = ()
    positions: tuple[Span, ...] = ()
    flat: tuple[Span, ...] = ()
    size: tuple[int, int] = (0, 0)
    in_batch: bool = False


class Run(Record):
    """Tokens `start` to `stop` (exclusive) of one row of the batch that have the values of other tokens.

    The first token has the values of `source` (row, position). Each next token has the values `step`
    positions later.
    """

    row: int
    start: int
    stop: int
    source: tuple[int, int]
    step: int = 1


class RankSource(Record):
    """A rank that has the values of another rank, at the same positions of its shard."""

    rank: int
    source: int


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


class TokenValues(Record):
    """Tokens of a module's output, or of its gradient, with wrong values; all other tokens are correct.

    `way` is the kind of error: the values of other tokens (`moved`), values of other tokens added to their
    own (`added`), `zero`, or their own values `twice`. `places` are the tokens, or None if the list is too
    long.

    `of_ranks` names the rank whose values each rank has, at the same positions. `offset` is the distance in
    rows and positions, within a rank's shard, from each token to the source of its values. `runs` has the
    first of `num_runs` runs.
    """

    kind: Literal["token-values"] = "token-values"
    way: Literal["moved", "zero", "twice", "added"]
    num_tokens: int
    places: TokenPlaces | None = None
    of_ranks: tuple[RankSource, ...] = ()
    offset: tuple[int, int] | None = None
    runs: tuple[Run, ...] = ()
    num_runs: int = 0

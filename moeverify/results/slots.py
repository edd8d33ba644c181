"""Values of one parameter in the place of another's, as where a flat buffer was filled or cut in another way."""

from __future__ import annotations

from typing import Literal

from moeverify.results.part import Tokens
from moeverify.results.record import Record

FlatOrder = Literal["registered", "reversed", "by-name", "smallest-first", "largest-first"]
"""In which order parameters stand one behind the other in a flat buffer."""


class Flattening(Record):
    """Parameters are written into a flat buffer in one order, and cut out of it in another.

    One of both may fill up each parameter to a multiple of `filled_written` or `filled_read` elements. With `family`
    the buffer has these parameters alone, or with `is_outside` all others.
    """

    written: FlatOrder
    read: FlatOrder
    filled_written: int = 1
    filled_read: int = 1
    family: str = ""
    is_outside: bool = False


class Piece(Record):
    """`count` elements from `at` on are those of `tensor` from `start` on; zeros where there is no such tensor.

    Places are those in what a rank has of a tensor, flat.
    """

    at: int
    count: int
    tensor: str = ""
    start: int = 0


class Displaced(Record):
    """A tensor has values of other ones, on `ranks` alone if these are given.

    Either all of its values are those of `source`, which has its values where it is `exchanged`; or they begin
    `offset` elements further on in the parameters one behind the other, in the order that they are registered in; or
    `flattening` says where they stand; or they are made of `pieces`. With `tokens` it is so of what these add to the
    tensor, and with `added` they stand there besides its own.
    """

    kind: Literal["displaced"] = "displaced"
    source: str = ""
    exchanged: bool = False
    offset: int = 0
    flattening: Flattening | None = None
    pieces: tuple[Piece, ...] = ()
    num_pieces: int = 0
    tokens: Tokens | None = None
    added: bool = False
    ranks: tuple[int, ...] = ()

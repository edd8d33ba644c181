"""Which part of the parameters something is about: all that have a few traits in common, and no others."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record

TraitKind = Literal[
    "named",
    "not-named",
    "dims",
    "layers",
    "from",
    "before",
    "every-other",
    "larger",
    "smaller",
    "sharded",
    "replicated",
    "on-ranks",
]
"""What parameters have in common: a part of their names, how many dims, layers, a place in the order of registration,
a size, an axis over which ranks hold parts of them, or copies, the ranks that hold them."""


class Trait(Record):
    """One trait: `name` is a part of a name, an axis, or the first parameter of a range; `numbers` are dims, layers,
    elements or ranks.
    """

    kind: TraitKind
    name: str = ""
    numbers: tuple[int, ...] = ()


class ParameterPart(Record):
    """The `count` parameters of `total` that have these traits; `alternatives` are others that the same ones have.

    `unseen` more have them, in which it could not be seen: they have no gradient, or are wrong in a way of their own.
    """

    traits: tuple[Trait, ...]
    count: int
    total: int
    unseen: int = 0
    alternatives: tuple[tuple[Trait, ...], ...] = ()

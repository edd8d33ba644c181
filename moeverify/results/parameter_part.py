"""A part of all parameters: exactly the parameters that share a few traits."""

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
"""The kinds of traits that parameters can share.

`named` and `not-named` concern a part of the name. `from`, `before` and `every-other` concern the position
in the order of registration. `larger` and `smaller` concern the number of elements. `sharded` and
`replicated` concern the placement over an axis, and `on-ranks` the ranks that hold them.
"""


class Trait(Record):
    """One trait of parameters.

    `name` is a part of a name, an axis, or the first parameter of a range. `numbers` are dims, layers,
    elements or ranks.
    """

    kind: TraitKind
    name: str = ""
    numbers: tuple[int, ...] = ()


class ParameterPart(Record):
    """The `count` parameters, of `total`, that have all of `traits`.

    `alternatives` are other sets of traits that select the same parameters. `unseen` more parameters have
    the traits but could not be tested: they have no gradient, or are wrong in another way.
    """

    traits: tuple[Trait, ...]
    count: int
    total: int
    unseen: int = 0
    alternatives: tuple[tuple[Trait, ...], ...] = ()

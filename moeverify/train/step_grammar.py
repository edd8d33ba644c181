"""A step of an optimizer as a formula in parts, each of which may be made otherwise.

What implementations have in the place of a part, by design or by mistake, is its ways: another tensor, another
place, another number, none at all. A variant is a formula with one way, or with those of two parts. So a mistake
need not be written down as a whole to be known. No torch is imported at run time, as in `recomputation`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, TypeVar

from moeverify.results.step_facts import Changes, StepChange

if TYPE_CHECKING:
    from torch import Tensor

_ALL_OF, _MOST_WAYS = 2, 4
"""All ways of so many parts are tried together, and of more parts so many: all triples would take seconds."""

Way = TypeVar("Way", bound=str)

Solve = Callable[["Tensor", "Tensor"], "Tensor"]
"""solve(target, direction): the number x by which target = x * direction, for each shard, at its elements (N,)."""


@dataclass(frozen=True)
class Made:
    """A result (N,) by another formula, and the number (N,) that it was solved for, the same in each shard.

    `usual` is what that number is by right: where it is found, the formula has no other one. `shrunk_by` is what a
    weight is multiplied by first, where that is another number than the right formula has.
    """

    values: Tensor
    number: Tensor | None = None
    usual: float | None = None
    shrunk_by: float | None = None


@dataclass(frozen=True)
class Grammar:
    """The parts of a formula with the ways that are other ones here, and how it is made with some of these ways."""

    parts: Mapping[str, Sequence[StepChange]]
    make: Callable[[Collection[str]], Made]
    known_alone: Collection[str] = ()
    """Ways that other checks tell where they are alone, by the coefficients of a sum."""

    def list_changes(self, count: int) -> Iterator[Changes]:
        """Yield the ways of each `count` parts, one of each part; of more than two parts the first ways alone."""
        most = None if count <= _ALL_OF else _MOST_WAYS
        for parts in combinations([ways[:most] for ways in self.parts.values()], count):
            yield from (ways for ways in product(*parts) if count > 1 or ways[0] not in self.known_alone)

    def list_known(self) -> Iterator[Changes]:
        """Yield the ways that other checks tell where they are alone."""
        yield from ((way,) for ways in self.parts.values() for way in ways if way in self.known_alone)


def pick(ways: Mapping[Way, Tensor], chosen: Collection[str], right: Tensor) -> Tensor:
    """Return what the chosen way of a part is, or the right one where none of them is chosen."""
    return next((value for name, value in ways.items() if name in chosen), right)

"""An optimizer step as a formula whose parts have alternatives.

The ways of a part are its alternatives in other implementations, by design or by mistake: another tensor,
order or number, or an omission. A variant of the formula uses one way, or one way in each of several parts.
Mistakes are thus recognized without a list of whole formulas. No torch is imported at run time, as in
`recomputation`.
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
"""Up to `_ALL_OF` parts: combine all ways. More parts: `_MOST_WAYS` each, as triples take seconds."""

Way = TypeVar("Way", bound=str)

Solve = Callable[["Tensor", "Tensor"], "Tensor"]
"""solve(target, direction): the x of each shard with target = x * direction, repeated to (N,)."""


@dataclass(frozen=True)
class Made:
    """A result (N,) of a variant, with the number (N,) it was solved for, which is equal within each shard.

    `usual` is the number's value in the right formula; a fit with that value is not a variant. `shrunk_by`
    is the factor that first multiplies the weight, if the variant has another factor than the right
    formula.
    """

    values: Tensor
    number: Tensor | None = None
    usual: float | None = None
    shrunk_by: float | None = None


@dataclass(frozen=True)
class Grammar:
    """The ways of each part of a formula, and the function `make` that evaluates it with chosen ways."""

    parts: Mapping[str, Sequence[StepChange]]
    make: Callable[[Collection[str]], Made]
    known_alone: Collection[str] = ()
    """Ways that other checks already report when they occur alone, from the coefficients of a sum."""

    def list_changes(self, count: int) -> Iterator[Changes]:
        """Yield combinations of `count` parts with one way each; for three or more, only the first ways."""
        most = None if count <= _ALL_OF else _MOST_WAYS
        for parts in combinations([ways[:most] for ways in self.parts.values()], count):
            yield from (ways for ways in product(*parts) if count > 1 or ways[0] not in self.known_alone)

    def list_known(self) -> Iterator[Changes]:
        """Yield the ways that other checks already report when they occur alone."""
        yield from ((way,) for ways in self.parts.values() for way in ways if way in self.known_alone)


def pick(ways: Mapping[Way, Tensor], chosen: Collection[str], right: Tensor) -> Tensor:
    """Return the value of the chosen way, or `right` if none of `ways` is chosen."""
    return next((value for name, value in ways.items() if name in chosen), right)

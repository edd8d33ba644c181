"""Grammar of layouts: the possible wrong orders of a tensor's values.

A tensor is a row-major grid of named dims. A dim may be split in two: a sequence into chunks, columns into
heads. A mistake permutes the dims, as a missing or additional transpose does, or reorders the parts along
one dim: reversed, rolled or in zigzag. Nothing is fitted: each order is a function from the place of an
element to its right place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import torch
from torch import Tensor

from moeverify.results.layout import Dim, DimName, Order

_MOST_DIMS = 5  # all orders of these are tried: 120
_OF_HALVES = ("sequence", "features", "rows", "columns")
"""Dims whose roll by half is described as an exchange of their halves."""

_MOST_ROLLED = 8  # parts of a dim for which rolls by all numbers are tried


@dataclass(frozen=True)
class Grid:
    """The dims of a tensor, the slowest first.

    `apart` has the positions of two dims that result from a split. If `is_nested`, these two are the outer
    parts of a dim with nested parts, and only they change places.
    """

    dims: tuple[Dim, ...]
    apart: tuple[int, int] | None = None
    is_nested: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of the dims."""
        return tuple(dim.size for dim in self.dims)

    def take_apart(self, at: int, outer: Dim, inner: DimName) -> Grid:
        """Return the grid with dim `at` split into the parts `outer`, each with a dim `inner`."""
        size = self.dims[at].size // outer.size
        dims = (*self.dims[:at], outer, Dim(name=inner, size=size), *self.dims[at + 1 :])
        return Grid(dims, (at, at + 1))


def locate(order: Order, places: Tensor) -> Tensor:
    """Return the right places of the values that this order puts at flat places of the grid `order.right`."""
    sizes = [dim.size for dim in order.right]
    if order.way == "stored":
        digits = dict(zip(order.dims, _split(places, [dim.size for dim in order.dims]), strict=True))
        return _join([digits[dim] for dim in order.right], sizes)
    digits_ = _split(places, sizes)
    if order.way == "read":
        by_dim = dict(zip(order.right, digits_, strict=True))
        return _join([by_dim[dim] for dim in order.dims], [dim.size for dim in order.dims])
    at = order.right.index(order.dims[0])
    digits_[at] = list_parts(order)[digits_[at]]
    return _join(digits_, sizes)


def list_parts(order: Order) -> Tensor:
    """Return, for each place along the order's single dim, the part that it contains."""
    size, number = order.dims[0].size, order.number
    places = torch.arange(size)
    half = torch.arange(size // 2)
    # With four chunks, a zigzag gives chunks 0 and 3 to the first rank, 1 and 2 to the second.
    zigzag = torch.stack([half, size - 1 - half], dim=1).flatten()
    ways: dict[str, Callable[[], Tensor]] = {
        "reversed": lambda: size - 1 - places,
        "rolled": lambda: places.roll(number),
        "same": lambda: torch.full_like(places, number),
        "zigzag": lambda: zigzag,
        "out-of-zigzag": zigzag.argsort,
    }
    return ways[order.way]()


def _split(places: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return the index along each dim."""
    digits = []
    for size in reversed(sizes):
        digits.append(places % size)
        places = places // size
    return digits[::-1]


def _join(digits: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    found = torch.zeros_like(digits[0])
    for digit, size in zip(digits, sizes, strict=True):
        found = found * size + digit
    return found


def list_orders(grid: Grid) -> Iterator[Order]:
    """Yield the permutations of the dims, except those that keep the parts of a split dim adjacent."""
    if len(grid.dims) > _MOST_DIMS and not grid.is_nested:
        return
    places = tuple(range(len(grid.dims)))
    all_turned: Iterable[tuple[int, ...]] = permutations(places)
    if grid.is_nested and grid.apart is not None:
        first, second = grid.apart
        all_turned = [(*places[:first], second, first, *places[second + 1 :])]
    for turned in all_turned:
        if _moves(turned, grid):
            dims = tuple(grid.dims[at] for at in turned)
            yield Order(way="stored", dims=dims, right=grid.dims)
            yield Order(way="read", dims=dims, right=grid.dims)


def _moves(turned: Sequence[int], grid: Grid) -> bool:
    """Return whether an order differs from all orders of the grid without the split."""
    if list(turned) == sorted(turned) or any(dim.size == 1 for dim in grid.dims):
        return False
    return grid.apart is None or grid.apart not in set(pairwise(turned))


def list_turns(grid: Grid, at: int) -> Iterator[Order]:
    """Yield the orders of the parts along one dim, including copies of one part to all places."""
    dim = grid.dims[at]
    if grid.apart is not None and at == grid.apart[1] and dim.size > _MOST_ROLLED:
        return  # inside parts with many elements
    numbers = range(1, dim.size) if dim.size <= _MOST_ROLLED else (1, dim.size - 1)
    found = [Order(way="reversed", dims=(dim,), right=grid.dims)] if dim.size > 1 else []
    # With two parts, the reversed order equals a roll by one.
    rolls = list(numbers) if dim.size > 2 else []
    if grid.apart is None and dim.name in _OF_HALVES:
        rolls = [number for number in rolls if 2 * number != dim.size]
    found += [Order(way="rolled", dims=(dim,), right=grid.dims, number=number) for number in rolls]
    if dim.size % 2 == 0 and dim.size > 2:
        found += [Order(way=way, dims=(dim,), right=grid.dims) for way in ("zigzag", "out-of-zigzag")]
    sames = range(dim.size) if 1 < dim.size <= _MOST_ROLLED else ()
    found += [Order(way="same", dims=(dim,), right=grid.dims, number=number) for number in sames]
    yield from found


def list_divisors(size: int) -> list[int]:
    """Return the divisors of a size in ascending order, without 1 and the size itself."""
    return [number for number in range(2, math.isqrt(size) + 1) if size % number == 0] + [
        size // number
        for number in range(math.isqrt(size), 1, -1)
        if size % number == 0 and number**2 != size
    ]

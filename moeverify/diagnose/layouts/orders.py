"""The grammar of layouts: in which other orders the values of a tensor may stand.

A tensor is a row-major grid of named dims, some of which are a dim taken apart: a sequence of chunks, columns of
heads. A mistake takes the grid for one whose dims come in another order, which is a transpose too many or too few, or
puts the parts along one dim into another order: reversed, rolled, in zigzag. Nothing of it is fitted, so each is a
function from the place of an element to the place where its value belongs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import torch
from torch import Tensor

from moeverify.results.layout import Dim, DimName, Order, OrderWay

_MOST_DIMS = 5  # of which all orders are tried: 120
_OF_HALVES = ("sequence", "features", "rows", "columns")
"""Dims of which a roll by half is said of their two halves."""

_MOST_ROLLED = 8  # parts of a dim, by each number of which they may be rolled


@dataclass(frozen=True)
class Grid:
    """The dims of a tensor, the slowest first. `apart` are the places of two dims that are one taken apart.

    Of a grid that `is_nested` these are parts of a dim that have parts themselves, and only these two change places.
    """

    dims: tuple[Dim, ...]
    apart: tuple[int, int] | None = None
    is_nested: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of the dims."""
        return tuple(dim.size for dim in self.dims)

    def take_apart(self, at: int, outer: Dim, inner: DimName) -> Grid:
        """Return the grid with a dim as so many parts, one after another, of `inner` elements each."""
        size = self.dims[at].size // outer.size
        dims = (*self.dims[:at], outer, Dim(name=inner, size=size), *self.dims[at + 1 :])
        return Grid(dims, (at, at + 1))


def locate(order: Order, places: Tensor) -> Tensor:
    """Return where the values belong that stand at flat places of a grid of `order.right`, in this order."""
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
    """Return which part of the one dim of an order stands at each place."""
    size, number = order.dims[0].size, order.number
    places = torch.arange(size)
    half = torch.arange(size // 2)
    # Of four chunks a zigzag gives the first rank 0 and 3, and the second 1 and 2.
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
    """Yield the orders of the dims of a grid, those that move no part of a dim that is taken apart left out."""
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
    """Return whether an order changes anything that a grid with fewer dims does not."""
    if list(turned) == sorted(turned) or any(dim.size == 1 for dim in grid.dims):
        return False
    return grid.apart is None or grid.apart not in set(pairwise(turned))


def list_turns(grid: Grid, at: int, *, but: Sequence[OrderWay] = ()) -> Iterator[Order]:
    """Yield the orders in which the parts along one dim may stand, and that all are the same one."""
    dim = grid.dims[at]
    if grid.apart is not None and at == grid.apart[1] and dim.size > _MOST_ROLLED:
        return  # within parts that have many elements
    numbers = range(1, dim.size) if dim.size <= _MOST_ROLLED else (1, dim.size - 1)
    found = [Order(way="reversed", dims=(dim,), right=grid.dims)] if dim.size > 1 else []
    # Of two parts the reverse order is the same as that of one roll.
    rolls = list(numbers) if dim.size > 2 else []
    if grid.apart is None and dim.name in _OF_HALVES:
        rolls = [number for number in rolls if 2 * number != dim.size]
    found += [Order(way="rolled", dims=(dim,), right=grid.dims, number=number) for number in rolls]
    if dim.size % 2 == 0 and dim.size > 2:
        found += [Order(way=way, dims=(dim,), right=grid.dims) for way in ("zigzag", "out-of-zigzag")]
    sames = range(dim.size) if 1 < dim.size <= _MOST_ROLLED else ()
    found += [Order(way="same", dims=(dim,), right=grid.dims, number=number) for number in sames]
    yield from (order for order in found if order.way not in but)


def list_divisors(size: int) -> list[int]:
    """Return the numbers of equal parts that a dim has, but for one part and parts of one."""
    return [number for number in range(2, math.isqrt(size) + 1) if size % number == 0] + [
        size // number
        for number in range(math.isqrt(size), 1, -1)
        if size % number == 0 and number**2 != size
    ]

"""Search for the orders of a grammar that explain misplaced values: test a sample first, then all values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.explain.fitting.layouts.levels import Level, Member, Piece
from moeverify.explain.fitting.layouts.orders import Grid, list_orders, list_turns, locate
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.layout import Order, Scope

MOST_ELEMENTS = 1 << 21  # of the tensor; testing all values of larger ones takes seconds
_SAMPLE = 96
_NAMED = ("heads", "key-value heads", "experts")
_LEAST_WRONG = 4  # elements; two exchanged elements fit another order by chance
_LEAST_ROUNDED, _MARGIN = 16, 16.0
"""Below float64: minimum of wrong elements, and of their median error in units of the allowed rounding."""

_MOST_ORDERS = 3  # if more orders fit, report none


@dataclass(frozen=True, order=True)
class Where:
    """The ranks or micro-batches that have an order; both are empty if all have it."""

    micro_batches: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class FoundOrders:
    """Orders that explain a tensor, the simplest first, and the place to which they are limited."""

    scope: Scope
    orders: tuple[Order, ...]
    where: Where
    num_tried: int


class OrderSearch:
    """Search of all levels for orders; `num_tried` counts the tested orders."""

    def __init__(self, tensor: WrongTensor) -> None:
        self.tensor = tensor
        self.num_tried = 0
        self.allowed = tensor.exact * float(tensor.expected.abs().max()) if tensor.expected.numel() else 0.0

    def run(self, levels: Iterator[Level]) -> FoundOrders | None:
        """Return the orders of the first grid in the first level that explains the tensor, or None."""
        if self.tensor.expected.numel() > MOST_ELEMENTS or not self._has_right_values():
            return None
        for level in levels:
            found = self._search(level)
            if found is not None:
                return found
        return None

    def _has_right_values(self) -> bool:
        """Return whether a sample of the wrong values occurs in the golden, as moved values do."""
        if not self.tensor.shards or (shard := self.tensor.worst_shard).local is None:
            return False
        actual, expected = shard.values().flatten(), self.tensor.expected_of(shard).flatten()
        wrong = ((actual - expected).abs() > self.allowed).nonzero().flatten()
        is_exact = self.tensor.precision == torch.float64
        if len(wrong) < (_LEAST_WRONG if is_exact else _LEAST_ROUNDED) or not bool(
            torch.isfinite(actual).all()
        ):
            return False
        error = (actual - expected)[wrong].abs().median()
        if not is_exact and float(error) < _MARGIN * self.allowed:
            return False
        values = actual[wrong[torch.linspace(0, len(wrong) - 1, min(_SAMPLE, len(wrong))).long()]]
        right = self.tensor.expected.flatten().sort().values
        at = torch.searchsorted(right, values).clamp(max=len(right) - 1)
        near = torch.minimum((right[at] - values).abs(), (right[(at - 1).clamp(min=0)] - values).abs())
        # Values that are all equal, such as zeros, are not moved values.
        return bool((near <= self.allowed).all()) and float((values - values[0]).abs().max()) > self.allowed

    def _search(self, level: Level) -> FoundOrders | None:
        samples = [
            (piece, member, self._sample(piece, member)) for piece in level.pieces for member in piece.members
        ]
        samples = [each for each in samples if len(each[2])][:4]
        if not samples:
            return None
        for number, grid in enumerate(level.grids):
            found: list[tuple[Order, Where]] = []
            for order in _list_all(grid):
                self.num_tried += 1
                where = self._confirm(order, level, samples)
                found += [] if where is None else [(order, where)]
            found = self._drop_equal(found, level)
            if found and len(found) <= _MOST_ORDERS:
                least = min(where for _, where in found)
                kept = [order for order, where in found if where == least]
                named = tuple(self._name(order, level, level.grids[number + 1 :]) for order in kept)
                return FoundOrders(level.scope, named, least, self.num_tried)
        return None

    def _name(self, order: Order, level: Level, grids: Sequence[Grid]) -> Order:
        """Return an equal order that takes a named part such as heads apart, if there is one."""
        if order.way not in ("stored", "read") or any(dim.name in _NAMED for dim in order.dims):
            return order
        places = torch.arange(len(level.pieces[0].expected))
        where = locate(order, places)
        for grid in grids:
            if grid.apart is not None and grid.dims[grid.apart[0]].name in _NAMED:
                for other in list_orders(grid):
                    if torch.equal(locate(other, places), where):
                        return other
        return order

    def _sample(self, piece: Piece, member: Member) -> Tensor:
        """Return a sample of the wrong places of a member."""
        wrong = ((member.actual - piece.expected[member.places]).abs() > self.allowed).nonzero().flatten()
        if not len(wrong):
            return wrong
        return wrong[torch.linspace(0, len(wrong) - 1, min(_SAMPLE, len(wrong))).long()]

    def _gives(self, order: Order, piece: Piece, member: Member, at: Tensor) -> bool:
        value = piece.expected[locate(order, member.places[at])]
        return bool(((value - member.actual[at]).abs() <= self.allowed).all())

    def _confirm(
        self, order: Order, level: Level, samples: Sequence[tuple[Piece, Member, Tensor]]
    ) -> Where | None:
        """Return the ranks or micro-batches that have an order; None if it does not fit or is ambiguous."""
        if not all(self._gives(order, *each) for each in samples):
            return None
        moved: list[Member] = []
        spared: list[Member] = []
        for piece in level.pieces:
            for member in piece.members:
                right = piece.expected[member.places]
                value = piece.expected[locate(order, member.places)]
                is_right = bool(((member.actual - right).abs() <= self.allowed).all())
                if not bool(((member.actual - value).abs() <= self.allowed).all()):
                    if not is_right:
                        return None
                    spared.append(member)
                elif not is_right:
                    moved.append(member)
        if not spared:
            return Where()
        if not {each.rank for each in moved} & {each.rank for each in spared}:
            return Where(ranks=tuple(sorted({each.rank for each in moved})))
        if not {each.call for each in moved} & {each.call for each in spared}:
            return Where(micro_batches=tuple(sorted({each.call for each in moved})))
        return None

    def _drop_equal(self, found: Sequence[tuple[Order, Where]], level: Level) -> list[tuple[Order, Where]]:
        """Return one of each set of orders that move every value to the same place."""
        kept: list[tuple[Order, Where]] = []
        places = torch.arange(len(level.pieces[0].expected))
        maps: list[Tensor] = []
        for order, where in found:
            sources = locate(order, places)
            if not any(torch.equal(sources, other) for other in maps):
                maps.append(sources)
                kept.append((order, where))
        return kept


def _list_all(grid: Grid) -> Iterator[Order]:
    """Yield all orders of a grid. If a dim is taken apart, yield only the orders that need this."""
    yield from list_orders(grid)
    if grid.is_nested:
        return
    for at in range(len(grid.dims)) if grid.apart is None else grid.apart:
        yield from list_turns(grid, at)

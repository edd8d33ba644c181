"""Levels of a layout: grids of the values of one rank, or of the whole tensor.

A level has pieces, which are grids of right values, and members, which are the ranks' values of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from moeverify.explain.fitting.layouts.orders import Grid, list_divisors
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.results.layout import Dim, DimName, Scope

_MOST_DIVISORS = 12


@dataclass(frozen=True)
class Member:
    """One rank's values of a piece: `places` (n) are positions in the flat grid, `actual` (n) the values."""

    rank: int
    places: Tensor
    actual: Tensor


@dataclass(frozen=True)
class Piece:
    """The right values (n) of a flat grid, and the ranks' values."""

    expected: Tensor
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Level:
    """Pieces of one scope with equal shapes, and the possible grids, the simplest first."""

    scope: Scope
    pieces: tuple[Piece, ...]
    grids: tuple[Grid, ...]


@dataclass(frozen=True)
class Counts:
    """Possible numbers of parts of a tensor's dims: `named` parts such as heads, by their number.

    `named` counts the parts on the single device; a rank has the fraction `share` of them.
    """

    named: Mapping[DimName, int]
    share: Fraction = Fraction(1)

    def of_rank(self, whole: int, local: int) -> Counts:
        """Return the counts of a rank that has `local` of the `whole` elements of a dim."""
        return replace(self, share=Fraction(local, whole))

    def list_parts(self, size: int, of: DimName) -> Iterator[Dim]:
        """Yield the outer dims into which a dim of this size may be split, the fewest parts first."""
        names = {int(count * self.share): name for name, count in reversed(list(self.named.items()))}
        divisors = list_divisors(size)
        few = {*divisors[:_MOST_DIVISORS], *names}
        for number in divisors:
            if number in few:
                yield Dim(name=names.get(number, "parts"), size=number, of=of)


def list_parameter_levels(tensor: WrongTensor, counts: Counts) -> Iterator[Level]:
    """Yield the levels of a parameter, its gradient or its state: the whole tensor, then each rank."""
    shape = tensor.expected.shape
    names: Mapping[int, tuple[DimName, ...]] = {
        1: ("rows",),
        2: ("rows", "columns"),
        3: ("experts", "rows", "columns"),
    }
    if len(shape) not in names or any(shard.local is None for shard in tensor.shards):
        return
    grids = tuple(_list_parameter_grids(_name(shape, names[len(shape)]), counts, shape))
    yield Level("whole", (_take_whole(tensor),), grids)
    local = {tuple(shard.region.local_shape) for shard in tensor.shards if shard.region.numel}
    if len(local) == 1 and local != {tuple(shape)} and len(next(iter(local))) == len(shape):
        dims = _name(next(iter(local)), names[len(shape)])
        grids = tuple(_list_parameter_grids(dims, counts, shape))
        pieces = tuple(_take_local(tensor, shard) for shard in tensor.shards if shard.region.numel)
        yield Level("rank", pieces, grids)


def _list_parameter_grids(dims: tuple[Dim, ...], counts: Counts, shape: Sequence[int]) -> Iterator[Grid]:
    yield Grid(dims)
    for at, dim in enumerate(dims):
        for part in counts.of_rank(shape[at], dim.size).list_parts(dim.size, dim.name):
            yield Grid(dims).take_apart(at, part, dim.name)
        yield from _list_nested(Grid(dims), at, counts.of_rank(shape[at], dim.size), "width")


def _list_nested(grid: Grid, at: int, counts: Counts, inner: DimName) -> Iterator[Grid]:
    """Yield grids with groups of parts along a dim, such as interleaved heads of several ranks."""
    dim = grid.dims[at]
    for part in counts.list_parts(dim.size, dim.name):
        for number in list_divisors(part.size)[:_MOST_DIVISORS]:
            one = part.model_copy(update={"size": part.size // number})
            groups = Dim(name="groups", size=number, of=part.name)
            width = Dim(name=inner, size=dim.size // part.size)
            dims = (*grid.dims[:at], groups, one, width, *grid.dims[at + 1 :])
            yield Grid(dims, (at, at + 1), is_nested=True)


def _name(shape: Sequence[int], names: Sequence[DimName]) -> tuple[Dim, ...]:
    return tuple(Dim(name=name, size=size) for name, size in zip(names, shape, strict=True))


def _take_local(tensor: WrongTensor, shard: RankShard) -> Piece:
    actual = shard.values().flatten()
    member = Member(shard.rank, torch.arange(len(actual)), actual)
    return Piece(tensor.expected_of(shard).flatten(), (member,))


def _take_whole(tensor: WrongTensor) -> Piece:
    members = [
        Member(shard.rank, shard.region.flat_index().flatten(), shard.values().flatten())
        for shard in tensor.shards
        if shard.local is not None and shard.region.numel
    ]
    return Piece(tensor.expected.flatten(), tuple(members))

"""Levels of a layout: grids of the values of one rank, of a group of ranks, or of the whole tensor.

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

_CHUNKS = 2  # of each rank in a zigzag
_MOST_DIVISORS = 12


@dataclass(frozen=True)
class Member:
    """One rank's values of a piece.

    `places` (n) are positions in the flat grid, `actual` (n) the values there. `call` is the number of the
    micro-batch.
    """

    rank: int
    places: Tensor
    actual: Tensor
    call: int = 0


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
    """Possible numbers of parts of a tensor's dims: `named` parts such as heads, and the sizes of the axes.

    `named` counts the parts on the single device; a rank has the fraction `share` of them.
    """

    named: Mapping[DimName, int]
    degrees: tuple[int, ...]
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


def list_token_levels(
    tensor: WrongTensor, groups: Mapping[str, Sequence[Sequence[int]]], counts: Counts
) -> Iterator[Level]:
    """Yield the levels of a module output or gradient.

    Shape of the tensor: (batch, sequence, features) or (batch, sequence, heads, width).
    """
    rest = tensor.expected.shape[2:]
    names: tuple[DimName, ...] = ("features",) if len(rest) == 1 else ("heads", "width")
    if len(rest) != len(names):
        return
    calls = _list_calls(tensor)
    local = {tuple(shard.region.local_shape) for call in calls for shard in call.values()}
    if len(local) == 1:
        dims = _name((next(iter(local))), ("batch", "sequence", *names))
        own = counts.of_rank(tensor.expected.shape[2], dims[2].size)
        pieces = [
            _take_local(tensor, shard, number) for number, call in enumerate(calls) for shard in call.values()
        ]
        yield Level("rank", tuple(pieces), tuple(_list_token_grids(dims, own, 0)))
        yield from _list_group_levels(tensor, calls, dims, groups, counts)
    dims = _name(tensor.expected.shape, ("batch", "sequence", *names))
    yield Level("whole", (_take_whole(tensor),), tuple(_list_token_grids(dims, counts, 0)))


def _list_group_levels(
    tensor: WrongTensor,
    calls: Sequence[Mapping[int, RankShard]],
    dims: tuple[Dim, ...],
    groups: Mapping[str, Sequence[Sequence[int]]],
    counts: Counts,
) -> Iterator[Level]:
    for axis, members in groups.items():
        size = len(members[0])
        together = [
            [call[rank] for rank in group]
            for call in calls
            for group in members
            if all(rank in call for rank in group)
        ]
        if size < 2 or not together or any(len(group) != size for group in members):
            continue
        ranks = Dim(name="ranks", size=size, axis=axis)
        pieces = tuple(_take_together(tensor, shards) for shards in together)
        first, *others = _list_token_grids((ranks, *dims), counts, 1, ranks=size)
        # Try reordered ranks first, then parts of the divided dim, then grids with more dims.
        yield Level("group", pieces, (first,))
        yield from _list_joined_levels(tensor, together, dims, counts)
        yield Level("group", pieces, tuple(others))


def _list_joined_levels(
    tensor: WrongTensor,
    together: Sequence[Sequence[RankShard]],
    dims: tuple[Dim, ...],
    counts: Counts,
) -> Iterator[Level]:
    """Yield the level of ranks that divide one dim, with their parts concatenated along this dim."""
    size = len(together[0])
    divided = {
        dim
        for shards in together
        for dim in range(len(dims))
        if len({tuple(shard.region.dims[dim]) for shard in shards}) > 1
    }
    if len(divided) != 1:
        return
    (at,) = divided
    whole = dims[at].model_copy(update={"size": dims[at].size * size})
    joined = Grid((*dims[:at], whole, *dims[at + 1 :]))
    parts = [
        Dim(name="chunks" if whole.name == "sequence" else "parts", size=size * each, of=whole.name)
        for each in (1, _CHUNKS)
        if whole.size % (size * each) == 0 and size * each < whole.size
    ]
    if whole.name == "features":
        parts = [*counts.list_parts(whole.size, whole.name)]
    inner: DimName = "width" if whole.name == "features" else whole.name
    grids = tuple(joined.take_apart(at, part, inner) for part in parts)
    grids += tuple(_list_nested(joined, at, counts, inner)) if whole.name == "features" else ()
    pieces = tuple(_join(tensor, shards, at) for shards in together)
    yield Level("group", pieces, grids)


def _list_token_grids(dims: tuple[Dim, ...], counts: Counts, at: int, *, ranks: int = 0) -> Iterator[Grid]:
    """Yield grids of tokens with at most one dim split; the batch is dim `at`."""
    grid = Grid(dims)
    yield grid
    sequence = dims[at + 1].size
    numbers = [ranks, ranks * _CHUNKS] if ranks else [*counts.degrees, *(_CHUNKS * n for n in counts.degrees)]
    for number in dict.fromkeys([*numbers, 2, 4]):
        if number > 1 and sequence % number == 0 and number < sequence:
            chunks = Dim(name="chunks", size=number, of="sequence")
            yield grid.take_apart(at + 1, chunks, "sequence")
    if len(dims) == at + 3:
        features = dims[-1].size
        own = [ranks] if ranks and features % ranks == 0 and ranks < features else []
        for part in [Dim(name="parts", size=each, of="features") for each in own] or counts.list_parts(
            features, "features"
        ):
            yield grid.take_apart(at + 2, part, "width")
        yield from _list_nested(grid, at + 2, counts, "width")
    if not ranks:
        for number in list_divisors(dims[at].size):
            yield grid.take_apart(at, Dim(name="parts", size=number, of="batch"), "batch")


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


def _list_calls(tensor: WrongTensor) -> list[dict[int, RankShard]]:
    """Return the shards of each rank by micro-batch: the first of each rank, the second, and so on."""
    by_rank: dict[int, list[RankShard]] = {}
    for shard in tensor.shards:
        if shard.local is not None and shard.region.numel:
            by_rank.setdefault(shard.rank, []).append(shard)
    most = max(map(len, by_rank.values()), default=0)
    return [{rank: each[n] for rank, each in by_rank.items() if n < len(each)} for n in range(most)]


def _name(shape: Sequence[int], names: Sequence[DimName]) -> tuple[Dim, ...]:
    return tuple(Dim(name=name, size=size) for name, size in zip(names, shape, strict=True))


def _take_local(tensor: WrongTensor, shard: RankShard, call: int = 0) -> Piece:
    actual = shard.values().flatten()
    member = Member(shard.rank, torch.arange(len(actual)), actual, call)
    return Piece(tensor.expected_of(shard).flatten(), (member,))


def _take_whole(tensor: WrongTensor) -> Piece:
    members = [
        Member(shard.rank, shard.region.flat_index().flatten(), shard.values().flatten())
        for shard in tensor.shards
        if shard.local is not None and shard.region.numel
    ]
    return Piece(tensor.expected.flatten(), tuple(members))


def _take_together(tensor: WrongTensor, shards: Sequence[RankShard]) -> Piece:
    """Return the piece of a group: the shards of its ranks, concatenated."""
    size = shards[0].region.numel
    members = [
        Member(shard.rank, torch.arange(number * size, (number + 1) * size), shard.values().flatten())
        for number, shard in enumerate(shards)
    ]
    return Piece(torch.cat([tensor.expected_of(shard).flatten() for shard in shards]), tuple(members))


def _join(tensor: WrongTensor, shards: Sequence[RankShard], dim: int) -> Piece:
    """Return the piece of a group whose shards are concatenated along a dim."""
    expected = torch.cat([tensor.expected_of(shard) for shard in shards], dim=dim)
    places = torch.arange(expected.numel()).view(expected.shape).chunk(len(shards), dim=dim)
    members = [
        Member(shard.rank, part.flatten(), shard.values().flatten())
        for shard, part in zip(shards, places, strict=True)
    ]
    return Piece(expected.flatten(), tuple(members))

"""Products that ranks divide: each has a slice of the features and of a weight, and their products are added up.

A row-wise layer sums over slices of its input, and what a column-wise one passes back is such a sum, too. What is not
summed is a slice of each rank: the output of a column-wise layer, and what a row-wise one passes back. Under sequence
parallelism the sum is scattered and the slice is made of all positions, so that each may be of other positions.

Letters: n ranks, B rows, S positions, F features that are divided, H of the sum. Chunk j of the positions is that of
rank j.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from moeverify.diagnose.replay.chunks import Chunks
from moeverify.diagnose.replay.language import Cell, Formula, draw_like
from moeverify.diagnose.replay.tokenwise import LinearFormula, SumFormula, pick_dims
from moeverify.results.change import Change

SUM, SLICES = "sum-over-ranks", "slices-of-ranks"
"""The parts of a formula: a sum of what ranks make, or the slice that each rank has."""

Pair = tuple[Tensor, Tensor]
"""What a product is made of: x (B, S, F) and a weight (F, H)."""

_OF_SUM = (
    "own",
    "not-own",
    "own-twice",
    "own-times",
    "weights-own",
    "weights-next",
    "weights-before",
    "weights-reversed",
    "weights-first",
    "inputs-own",
)
_MOVED_CHUNKS = (
    "chunk-of-own",
    "chunk-next",
    "chunk-before",
    "chunks-reversed",
    "chunk-first",
    "chunks-summed",
)
_OF_SUM_AND_CHUNKS = (
    "of-position",
    "not-of-position",
    "weights-of-position",
    "inputs-of-position",
    "own-chunks",
    *_MOVED_CHUNKS,
)
_OF_SLICES = ("next", "before", "reversed", "first", "summed", "mean")
_OF_SLICES_AND_CHUNKS = (
    "of-position",
    "exchanged",
    "own-chunk-alone",
    "not-own-chunk",
    *_MOVED_CHUNKS,
    "chunks-mean",
)
_MOST_RANKS = 16


@dataclass(frozen=True)
class Shards:
    """How ranks divide what is between them: `size` of them, and the number of each rank among these.

    `places` (n, S/n) are the positions of each, where they divide these besides; none else.
    """

    size: int = 1
    ranks: Sequence[int] = (0,)
    places: Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.int64))

    @property
    def has_places(self) -> bool:
        """Return whether each rank has positions of its own."""
        return self.places.numel() > 0

    def list_slices(self, of: str) -> list[Change]:
        """Return how the slice of each rank may be otherwise, of a `result` or of what is `given`."""
        ways = (*_OF_SLICES, *(_OF_SLICES_AND_CHUNKS if self.has_places else ()))
        return [Change(part=SLICES, way=way, name=of) for way in ways]

    def list_sums(self) -> list[Change]:
        """Return how a sum over ranks may be otherwise."""
        ways = (*_OF_SUM, *(_OF_SUM_AND_CHUNKS if self.has_places else ()))
        found = [Change(part=SUM, way=way) for way in ways]
        numbers = range(self.size)
        return found + [Change(part=SUM, way=way, number=n) for way in ("without", "only") for n in numbers]

    def divides(self, width: int) -> bool:
        """Return whether there are several ranks, with as many features each."""
        return 1 < self.size <= _MOST_RANKS and width % self.size == 0

    def find_owner(self, length: int) -> Tensor:
        """Return which rank has each position (S)."""
        owner = torch.zeros(length, dtype=torch.int64)
        for rank, places in enumerate(self.places):
            owner[places] = rank
        return owner

    def move(self, x: Tensor, way: str) -> Tensor:
        """Return x (B, S, F) with the slices of ranks otherwise, all ranks' in one tensor."""
        blocks = x.unflatten(-1, (self.size, -1))  # type: ignore[no-untyped-call]
        ranks, owner = torch.arange(self.size), self.find_owner(x.shape[1])
        own = (owner[:, None] == ranks)[..., None].to(x.dtype)
        ways: Mapping[str, Callable[[], Tensor]] = {
            "next": lambda: blocks.roll(-1, 2),
            "before": lambda: blocks.roll(1, 2),
            "reversed": lambda: blocks.flip(2),
            "first": lambda: blocks[:, :, :1].expand_as(blocks),
            "summed": lambda: blocks.sum(2, keepdim=True).expand_as(blocks),
            "mean": lambda: blocks.mean(2, keepdim=True).expand_as(blocks),
            "of-position": lambda: (blocks * own).sum(2, keepdim=True).expand_as(blocks),
            "own-chunk-alone": lambda: blocks * own,
            "not-own-chunk": lambda: blocks * (1.0 - own),
            "exchanged": lambda: self._exchange(blocks),
        }
        if way in ways:
            return ways[way]().reshape(x.shape)
        moved = [self.move_chunks(x, way, rank).unflatten(-1, (self.size, -1))[:, :, rank] for rank in ranks]  # type: ignore[no-untyped-call]
        return torch.stack(moved, 2).reshape(x.shape)

    def _exchange(self, blocks: Tensor) -> Tensor:
        """Return blocks (B, S, n, F/n) of which rank and chunk are exchanged, as by an exchange too many."""
        found = torch.empty_like(blocks)
        for rank in range(self.size):
            for chunk, places in enumerate(self.places):
                found[:, places, rank] = blocks[:, self.places[rank], chunk]
        return found

    def move_chunks(self, x: Tensor, way: str, rank: int) -> Tensor:
        """Return x (B, S, ...) as a rank has it, with chunks of positions in the places of others."""
        parts = torch.stack([x[:, places] for places in self.places])
        number = int(rank)
        ways: Mapping[str, Callable[[], Tensor]] = {
            "chunk-of-own": lambda: parts[number].expand_as(parts),
            "chunk-next": lambda: parts.roll(-1, 0),
            "chunk-before": lambda: parts.roll(1, 0),
            "chunks-reversed": lambda: parts.flip(0),
            "chunk-first": lambda: parts[:1].expand_as(parts),
            "chunks-summed": lambda: parts.sum(0, keepdim=True).expand_as(parts),
            "chunks-mean": lambda: parts.mean(0, keepdim=True).expand_as(parts),
        }
        moved, found = ways[way](), torch.empty_like(x)
        for places, part in zip(self.places, moved, strict=True):
            found[:, places] = part
        return found

    def add_up(self, pairs: Sequence[Pair], change: Change, rank: int) -> Tensor:
        """Return the sum of products (B, S, H) as a rank has it otherwise."""
        ranks = torch.arange(self.size)
        own, number, way = self.ranks[rank], int(change.number or 0), change.way

        def multiply(inputs: Tensor, weights: Tensor) -> Tensor:
            """Return for each k the slice of x of rank inputs[k] times that of the weight of rank weights[k]."""
            return sum_pairs(pairs, self.size, inputs, weights)

        parts = multiply(ranks, ranks)
        total = parts.sum(0)
        owner = self.find_owner(total.shape[1])
        ways: Mapping[str, Callable[[], Tensor]] = {
            "own": lambda: parts[own],
            "not-own": lambda: total - parts[own],
            "own-twice": lambda: total + parts[own],
            "own-times": lambda: parts[own] * self.size,
            "without": lambda: total - parts[number],
            "only": lambda: parts[number],
            "weights-own": lambda: multiply(ranks, torch.full_like(ranks, own)).sum(0),
            "weights-next": lambda: multiply(ranks, ranks.roll(-1)).sum(0),
            "weights-before": lambda: multiply(ranks, ranks.roll(1)).sum(0),
            "weights-reversed": lambda: multiply(ranks, ranks.flip(0)).sum(0),
            "weights-first": lambda: multiply(ranks, torch.zeros_like(ranks)).sum(0),
            "inputs-own": lambda: multiply(torch.full_like(ranks, own), ranks).sum(0),
            "of-position": lambda: pick_owner(parts, owner),
            "not-of-position": lambda: total - pick_owner(parts, owner),
            "weights-of-position": lambda: pick_owner(
                torch.stack([multiply(ranks, torch.full_like(ranks, each)).sum(0) for each in ranks]), owner
            ),
            "inputs-of-position": lambda: pick_owner(
                torch.stack([multiply(torch.full_like(ranks, each), ranks).sum(0) for each in ranks]), owner
            ),
            "own-chunks": lambda: self.move_chunks(pick_owner(parts, owner), "chunks-summed", own),
        }
        return ways[way]() if way in ways else self.move_chunks(total, way, own)


def make_shards(size: int, ranks: Sequence[int], chunks: Chunks, *, divides_positions: bool) -> Shards:
    """Return how the ranks of tp divide features, and positions of each rank over cp under sequence parallelism."""
    parts = [torch.tensor(tuple(each)) for each in chunks.positions]
    if not divides_positions or any(len(each) % size for each in parts):
        return Shards(size, ranks)
    places = torch.cat([each.view(size, -1) for each in parts], dim=1)
    return Shards(size, ranks, places)


def sum_pairs(pairs: Sequence[Pair], size: int, inputs: Tensor, weights: Tensor) -> Tensor:
    """Return (n, B, S, H): of each pair the slices of some ranks multiplied, added up over pairs."""
    found = []
    for x, weight in pairs:
        slices = torch.stack(x.chunk(size, dim=-1))[inputs]
        rows = torch.stack(weight.chunk(size, dim=0))[weights]
        found.append(torch.einsum("nbsf,nfh->nbsh", slices, rows))
    return torch.stack(found).sum(0)


def pick_owner(parts: Tensor, owner: Tensor) -> Tensor:
    """Return of (n, B, S, H) at each position that of the rank which has it."""
    return parts[owner, :, torch.arange(parts.shape[2])].transpose(0, 1)


class ProductsFormula(SumFormula):
    """A sum of products x (B, S, F) with a weight (F, H), by name: what layers pass back to one input."""

    def __init__(self, pairs: Mapping[str, Pair]) -> None:
        super().__init__({name: x @ weight for name, (x, weight) in pairs.items()})
        self.pairs = pairs

    def redraw(self) -> Formula | None:
        """Return the same of numbers that are drawn anew."""
        drawn = {
            name: (draw_like(x, 2 * n), draw_like(weight, 2 * n + 1))
            for n, (name, (x, weight)) in enumerate(self.pairs.items())
        }
        return ProductsFormula(drawn)


class ShardedFormula(Formula):
    """A formula of which ranks divide something: a `sum` that they make, the `result`, or what is `given` to it.

    `given` is the attribute `gradient` of the inner formula (B, S, F).
    """

    def __init__(self, inner: Formula, shards: Shards, what: Literal["sum", "result", "given"]) -> None:
        self.inner, self.shards, self.what = inner, shards, what
        self.ways = [*(shards.list_sums() if what == "sum" else shards.list_slices(what)), *inner.ways]
        self.fits, self.places, self.block = inner.fits, inner.places, inner.block
        self.alone = inner.alone | {SUM, SLICES}
        self.has_pairs, self.most_paired = inner.has_pairs, inner.most_paired
        self._whole: Tensor | None = None

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the output at a cell."""
        if SUM in changes:
            whole = self.shards.add_up(self._list_pairs(), changes[SUM], cell.rank) + self._find_bias()
            return pick_dims(whole[cell.rows][:, cell.positions], cell)
        if SLICES not in changes:
            return self.inner.evaluate(cell, changes)
        way = changes[SLICES].way
        if self.what == "result":
            return pick_dims(self.shards.move(self._compute(cell), way)[cell.rows][:, cell.positions], cell)
        inner = copy(self.inner)
        inner.gradient = self.shards.move(inner.gradient, way)  # type: ignore[attr-defined]
        rest = {place: change for place, change in changes.items() if place != SLICES}
        return inner.evaluate(cell, rest)

    def redraw(self) -> Formula | None:
        """Return the same of numbers that are drawn anew."""
        inner = self.inner.redraw()
        return None if inner is None else ShardedFormula(inner, self.shards, self.what)

    def _compute(self, cell: Cell) -> Tensor:
        """Return what all ranks should have, of all rows and positions."""
        if self._whole is None:
            x = self.inner.x if isinstance(self.inner, LinearFormula) else self.inner.forward.x  # type: ignore[attr-defined]
            rows, positions = (torch.arange(size) for size in x.shape[:2])
            everything = Cell(cell.rank, rows, positions, positions, (), (rows, positions))
            self._whole = self.inner.evaluate(everything, {})
        return self._whole

    def _list_pairs(self) -> list[Pair]:
        if isinstance(self.inner, ProductsFormula):
            return list(self.inner.pairs.values())
        if isinstance(self.inner, LinearFormula):
            return [(self.inner.x, self.inner.weight.T)]
        return [(self.inner.gradient, self.inner.forward.weight)]  # type: ignore[attr-defined]

    def _find_bias(self) -> Tensor:
        """Return what is added after the sum."""
        bias = self.inner.bias if isinstance(self.inner, LinearFormula) else None
        return torch.zeros(()) if bias is None else bias

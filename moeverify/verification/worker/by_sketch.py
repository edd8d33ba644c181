"""Comparison with a golden of sketches: ranks sketch their shards, and rank 0 adds the sketches up.

A rank sends the rows of the blocks that its shard reaches, so that the work of rank 0 is linear in tensors and
shards. No tensor is gathered. Tensors that the golden stores whole are compared on the ranks as always.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from moeverify.parallel.regions.observer import Named
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.sketch import MOMENTS, WIDTH, BlockGrid
from moeverify.results.checks import UNCOMPARED_KINDS
from moeverify.verification.compare.assembled import Key
from moeverify.verification.compare.comparison import ComparedShard, Comparison
from moeverify.verification.compare.difference import NUM_STATISTICS, TensorDifference, fingerprint_bits
from moeverify.verification.golden.sketched import add_sketches, make_sketch, measure_squares
from moeverify.verification.golden.store import StoredGolden, tensor_key

_NONFINITE, _SQUARE = MOMENTS.index("nonfinite"), MOMENTS.index("square")
_UNKNOWN = TensorDifference.from_statistics([0.0] * NUM_STATISTICS)


@dataclass(frozen=True)
class ShardSketch:
    """The sketch of a shard: the rows (n, columns) of the blocks (n) that it reaches, with its elements there."""

    blocks: Tensor
    counts: Tensor
    rows: Tensor

    @classmethod
    def of(cls, kind: str, local: Tensor, region: Region) -> ShardSketch:
        """Return the sketch of a shard, on the device of its values."""
        blocks, counts = _count(region)
        return cls(blocks, counts, make_sketch(kind, local, region))

    def fetch(self) -> ShardSketch:
        """Return the sketch on the CPU, without the blocks that the shard does not reach."""
        return replace(self, rows=self.rows.cpu()[self.blocks])

    def spread(self, num_blocks: int) -> Tensor:
        """Return the contribution to the sketch of the whole tensor. Shape: (num_blocks, columns)."""
        whole = torch.zeros((num_blocks, self.rows.shape[1]), dtype=torch.float64)
        whole[self.blocks] = self.rows
        return whole


@lru_cache(maxsize=4096)
def _count(region: Region) -> tuple[Tensor, Tensor]:
    """Return the blocks (n) that a region reaches, and its elements there (n)."""
    counts = BlockGrid.of(region.shape).count_in(region)
    blocks = counts.nonzero().reshape(-1)
    return blocks, counts[blocks]


@dataclass(frozen=True)
class SketchedEntry:
    """A shard whose difference is known only after rank 0 adds up the sketches of all ranks.

    `bits` is the hash of its values, on their device until `fetch`: a step does not wait for the device.
    """

    entry: ComparedShard
    part: ShardSketch
    bits: Tensor

    def fetch(self) -> SketchedEntry:
        """Return the entry with the hash of its values, and the sketch on the CPU."""
        entry = replace(self.entry, bits=int(self.bits))
        return replace(self, entry=entry, part=self.part.fetch(), bits=self.bits.cpu())


def plain_entry(entry: ComparedShard | SketchedEntry) -> ComparedShard:
    """Return the entry of a shard, without a difference if it was sketched."""
    return entry.entry if isinstance(entry, SketchedEntry) else entry


class SketchComparison:
    """Observer that sketches the tensors that the golden stores as sketches, and compares the others."""

    def __init__(self, golden: StoredGolden) -> None:
        self._golden = golden
        self._whole = Comparison(golden)
        self._seen: list[SketchedEntry | None] = []  # None for a shard of `_whole`

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Sketch or compare one shard; see `moeverify.parallel.regions.observer.Observer`."""
        self.observe_all(step, kind, [(name, local, region)])

    def observe_all(self, step: int, kind: str, shown: Sequence[Named]) -> None:
        """Sketch or compare the shards of one kind; see `moeverify.parallel.regions.observer.BulkObserver`."""
        if kind in UNCOMPARED_KINDS:
            return
        whole = []
        for name, local, region in shown:
            shape = self._golden.sketches.get(tensor_key(kind, name))
            self._seen.append(None if shape is None else _sketch(step, kind, name, local, region, shape))
            if shape is None:
                whole.append((name, local, region))
        self._whole.observe_all(step, kind, whole)

    def begin_step(self, step: int) -> None:
        """Do nothing, because each observation names its step."""

    def entries(self) -> Iterator[ComparedShard | SketchedEntry]:
        """Yield one entry per shard, in the order of observation."""
        compared = self._whole.entries()
        for seen in self._seen:
            yield next(compared) if seen is None else seen.fetch()


def _sketch(
    step: int, kind: str, name: str, local: Tensor | None, region: Region, shape: tuple[int, ...]
) -> SketchedEntry:
    if shape != region.shape:
        raise ValueError(f"cannot compare shape {region.shape} with {shape}")
    values = torch.zeros(region.local_shape, dtype=torch.float64) if local is None else local.detach()
    values = values.reshape(region.local_shape)
    state = "absent" if local is None else "compared"
    entry = ComparedShard(step, kind, name, region.key, shape, region.local_shape, state, 0, _UNKNOWN)
    return SketchedEntry(entry, ShardSketch.of(kind, values, region), fingerprint_bits(values))


def estimate_entries(
    by_rank: Sequence[Sequence[ComparedShard | SketchedEntry]], golden: StoredGolden
) -> list[list[ComparedShard]]:
    """Return the entries of all ranks, in order, with the estimated differences of sketched shards.

    Sketches of all regions of a tensor are added up and compared with the golden's. If replicas differ, each
    replica is judged together with the first replica of every other region.
    """
    members: dict[Key, list[SketchedEntry]] = {}
    for entries in by_rank:
        for each in entries:
            if isinstance(each, SketchedEntry):
                members.setdefault((each.entry.step, each.entry.kind, each.entry.name), []).append(each)
    found: dict[int, ComparedShard] = {}
    for key, shards in members.items():
        expected = golden.sketch(*key)
        assert expected is not None
        found |= {id(shard): entry for shard, entry in _estimate(expected, shards)}
    return [
        [found[id(each)] if isinstance(each, SketchedEntry) else each for each in entries]
        for entries in by_rank
    ]


def _estimate(
    expected: Tensor, shards: Sequence[SketchedEntry]
) -> Iterator[tuple[SketchedEntry, ComparedShard]]:
    num_blocks = len(expected)
    first: dict[str, SketchedEntry] = {}
    for shard in shards:
        known = first.get(shard.entry.region)
        if known is None or known.entry.state == "absent":
            first[shard.entry.region] = shard
    total = torch.zeros_like(expected)
    counts = torch.zeros(num_blocks, dtype=torch.float64)
    for shard in first.values():
        total = add_sketches(total, shard.part.spread(num_blocks))
        counts[shard.part.blocks] += shard.part.counts
    judged = _SketchComparison.of(expected, total, counts)
    for shard in shards:
        known = first[shard.entry.region]
        if shard.entry.bits == known.entry.bits and shard.entry.state == known.entry.state:
            yield shard, judged.describe(shard)
            continue
        others = add_sketches(total, known.part.spread(num_blocks), times=-1)
        own = add_sketches(others, shard.part.spread(num_blocks))
        yield shard, _SketchComparison.of(expected, own, counts).describe(shard)


@dataclass(frozen=True)
class _SketchComparison:
    """The sketch of a whole tensor against that of the golden, block by block.

    `counts` are the elements of all regions in each block, `squares` the estimated squared errors. `ratio`
    is the factor between the projections.
    """

    expected: Tensor
    counts: Tensor
    squares: Tensor
    ratio: float

    @classmethod
    def of(cls, expected: Tensor, total: Tensor, counts: Tensor) -> _SketchComparison:
        """Return the comparison of two sketches."""
        e, a = (each[:, len(MOMENTS) : WIDTH] for each in (expected, total))
        norm = (e * e).sum().item()
        ratio = (e * a).sum().item() / norm if norm > 0.0 else 0.0
        return cls(expected, counts, measure_squares(expected, total), ratio)

    def describe(self, shard: SketchedEntry) -> ComparedShard:
        """Return the entry of a shard with its share, by elements, of the errors of its blocks."""
        part = shard.part
        share = part.counts / self.counts[part.blocks]
        errors = self.squares[part.blocks] * share
        expected2 = (self.expected[part.blocks, _SQUARE] * share).sum().item()
        actual2 = part.rows[:, _SQUARE].sum().item()
        most = (expected2 * actual2) ** 0.5
        worst = int(errors.argmax()) if len(errors) else None
        largest = 0.0 if worst is None else float(errors[worst]) ** 0.5
        difference = replace(
            _UNKNOWN,
            count=part.counts.sum().item(),
            sum_expected2=expected2,
            sum_actual2=actual2,
            sum_product=max(-most, min(most, self.ratio * expected2)),
            sum_error2=errors.sum().item(),
            max_error=largest,
            num_nonfinite=part.rows[:, _NONFINITE].sum().item(),
        )
        grid = BlockGrid.of(shard.entry.shape)
        block = grid.locate(int(part.blocks[worst])) if worst is not None and largest > 0.0 else ()
        return replace(shard.entry, difference=difference, is_estimated=True, block=block)

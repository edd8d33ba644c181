"""One logical tensor over all ranks: the comparisons of its shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from moeverify.gc_pause import uncollected
from moeverify.results.comparable import comparable
from moeverify.verification.compare.comparison import ComparedShard
from moeverify.verification.compare.difference import TensorDifference

Key = tuple[int, str, str]  # step, kind, name
Coordinates = Mapping[int, Mapping[str, int]]
"""The coordinates of each rank, by mesh axis."""


@dataclass
class Assembled:
    """The shards of one logical tensor as (rank, entry).

    Add all shards before reading a property: `difference` is cached.
    """

    key: Key
    shards: list[tuple[int, ComparedShard]] = field(default_factory=list)

    @property
    def distinct(self) -> dict[str, tuple[int, ComparedShard]]:
        """Return, for each region, the replica with the largest difference from the golden."""
        worst: dict[str, tuple[int, ComparedShard]] = {}
        for rank, entry in self.shards:
            if entry.state == "absent" and entry.region in worst:
                continue
            best = worst.get(entry.region)
            if best is None or _size(entry) > _size(best[1]):
                worst[entry.region] = (rank, entry)
        return worst

    @cached_property
    def difference(self) -> TensorDifference:
        """Return the difference over the whole logical tensor.

        Each region counts once, by its worst replica. Every element then has the same weight in a relative
        error as on one device, independent of the number of replicas.
        """
        parts = [entry.difference for _, entry in self.distinct.values()]
        total = parts[0]
        for part in parts[1:]:
            total = total.merge(part)
        return total

    @property
    def is_estimated(self) -> bool:
        """Return whether the difference was estimated from sketches."""
        return any(entry.is_estimated for _, entry in self.shards)

    def list_regions(self) -> dict[int, frozenset[str]]:
        """Return the regions of each rank. Ranks without a region are left out."""
        found: dict[int, set[str]] = {}
        for rank, entry in self.shards:
            found.setdefault(rank, set()).add(entry.region)
        return {rank: frozenset(regions) for rank, regions in found.items()}

    def worst_shard(self) -> tuple[int, ComparedShard]:
        """Return the shard whose largest element error is the largest."""
        return max(self.shards, key=lambda shard: comparable(_largest(shard[1])))

    def differing_ranks(self) -> tuple[int, ...]:
        """Return the ranks with at least 1 % of the worst rank's squared error."""
        most = max(_size(entry) for _, entry in self.shards)
        found = (rank for rank, entry in self.shards if most > 0 and _size(entry) >= 0.01 * most)
        return tuple(dict.fromkeys(found))


def assemble(by_rank: Sequence[Iterable[ComparedShard]], order: Mapping[str, int]) -> dict[Key, Assembled]:
    """Return the shards of all ranks by logical tensor, ordered by step and by kind.

    `by_rank` has the entries of each rank, in rank order. `order` maps each kind to its position in a step.
    """
    found: dict[Key, Assembled] = {}
    with uncollected():
        for rank, entries in enumerate(by_rank):
            for entry in entries:
                key = (entry.step, entry.kind, entry.name)
                found.setdefault(key, Assembled(key)).shards.append((rank, entry))
    return dict(sorted(found.items(), key=lambda item: (item[0][0], order[item[0][1]])))


def _size(entry: ComparedShard) -> float:
    return math.inf if entry.difference.num_nonfinite else entry.difference.sum_error2


def _largest(entry: ComparedShard) -> float:
    return math.inf if entry.difference.num_nonfinite else entry.difference.max_error

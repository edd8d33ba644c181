"""Detection of different parts of a model that begin with equal values on several ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from moeverify.results.finding import Finding
from moeverify.results.script import CopyFacts
from moeverify.scripts.guard.lines import RankHeader, StepRecord, SumLine, TensorLine
from moeverify.scripts.record.siblings import Parts, find_siblings, make_copy_finding, repeats_siblings


@dataclass
class CopyRule:
    """A check for tensor-parallel shards, and layers of pipeline stages, that are copies of each other.

    Ranks that draw the parts of a model from one seed hold copies, and train the same part several times.
    Constant values are ignored: they are equal in every model. At least half of the tensors that could be
    copies must be: a few may have a pattern of their own, such as decay rates.
    """

    headers: Mapping[int, RankHeader]
    stages: Mapping[int, int]
    _began: Mapping[int, Sequence[int]] = field(default_factory=dict)
    _streaks: dict[tuple[int, ...], set[tuple[int, str]]] = field(default_factory=dict)
    _is_done: bool = False

    def find(self, records: Mapping[int, StepRecord]) -> list[Finding]:
        """Return a finding for the parts of each kind with equal initial values; `records` are from one step."""
        if self._is_done:
            return []
        began = {rank: record.began for rank, record in records.items() if record.began}
        self._began = began or self._began
        found = [*self._find_shards(), *self._find_siblings()] if began else []
        found = found or list(self._find_sums(records))
        self._is_done = bool(found)
        step = next(iter(records.values())).step
        return [make_copy_finding(step, ranks, facts) for ranks, facts in found]

    def _list_varied(self, rank: int) -> Iterator[tuple[TensorLine, int]]:
        tensors = self.headers[rank].tensors
        yield from (
            (line, bits)
            for line, bits in zip(tensors, self._began.get(rank, ()), strict=False)
            if line.is_varied and bits
        )

    def _find_shards(self) -> Iterator[tuple[tuple[int, ...], CopyFacts]]:
        """Yield the DTensors of two ranks with different regions and equal values."""
        for one, two in combinations(self._list_different(), 2):
            theirs = {line.name: (line, bits) for line, bits in self._list_varied(two) if line.mesh}
            apart = [
                (line.name, bits == theirs[line.name][1])
                for line, bits in self._list_varied(one)
                if line.name in theirs and theirs[line.name][0].region != line.region
            ]
            names = tuple(name for name, is_equal in apart if is_equal)
            if names and 2 * len(names) >= len(apart):
                yield (one, two), CopyFacts(kind="shards", names=names)
                return

    def _find_siblings(self) -> Iterator[tuple[tuple[int, ...], CopyFacts]]:
        """Yield the tensors of two ranks whose names differ in numbers only, and whose values are equal."""
        parts = {rank: self._make_parts(rank) for rank in self._list_different()}
        if any(map(repeats_siblings, parts.values())):
            return  # the script copies layers on purpose
        for (one, first), (two, second) in combinations(parts.items(), 2):
            is_apart = self.stages.get(one, 0) != self.stages.get(two, 0)
            pairs = find_siblings(first, second, is_apart=is_apart)
            if pairs:
                names, others = tuple(pairs), tuple(pairs.values())
                yield (one, two), CopyFacts(kind="siblings", names=names, others=others)
                return

    def _list_different(self) -> list[int]:
        """Return one rank for each set of parameters: data-parallel ranks begin with the same values."""
        first: dict[object, int] = {}
        for rank in sorted(self._began):
            names = tuple((line.name, line.region) for line in self.headers[rank].tensors)
            first.setdefault((names, tuple(self._began[rank]), self.stages.get(rank, 0)), rank)
        return list(first.values())

    def _make_parts(self, rank: int) -> Parts:
        lines = self._list_varied(rank)
        return {line.name: (line.shape, bits) for line, bits in lines if not line.mesh}

    def _find_sums(self, records: Mapping[int, StepRecord]) -> Iterator[tuple[tuple[int, ...], CopyFacts]]:
        """Yield ranks whose sums of forward passes have equal operands on all of them, twice in a row."""
        groups = dict.fromkeys(line.ranks for record in records.values() for line in record.sums)
        for ranks in groups:
            if not set(ranks) <= records.keys() or self._share_data(ranks):
                continue
            lines = [[line for line in records[rank].sums if line.ranks == ranks] for rank in ranks]
            equal = _list_equal(lines)
            again = equal & self._streaks.get(ranks, set())
            self._streaks[ranks] = equal
            names = self._list_alike(ranks) if again else ()
            if names:
                _, site = min(again)
                yield ranks, CopyFacts(kind="sums", names=names, num_ranks=len(ranks), site=Path(site).name)
                return

    def _share_data(self, ranks: Sequence[int]) -> bool:
        return any(other in self.headers[one].data_ranks for one, other in combinations(ranks, 2))

    def _list_alike(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the plain tensors that begin with equal values on all of these ranks."""
        values = [
            {(line.name, line.shape, bits) for line, bits in self._list_varied(rank) if not line.mesh}
            for rank in ranks
        ]
        common = set.intersection(*values)
        names = [
            line.name for line, bits in self._list_varied(ranks[0]) if (line.name, line.shape, bits) in common
        ]
        return tuple(names)


def _list_equal(lines: Sequence[Sequence[SumLine]]) -> set[tuple[int, str]]:
    """Return place and site of the sums whose operands are equal on all ranks."""
    if len({len(each) for each in lines}) != 1:
        return set()
    return {
        (place, same[0].site)
        for place, same in enumerate(zip(*lines, strict=True))
        if same[0].hash and len({(line.site, line.hash) for line in same}) == 1
    }

"""Comparison of a run's tensors with another run's, as shard comparisons for the checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.scripts.compare.coefficients import Coefficient, find_coefficients
from moeverify.scripts.compare.places import Places
from moeverify.scripts.record.lines import Values
from moeverify.scripts.record.read import Key, RankRecord, RecordedRun
from moeverify.scripts.record.sketch import NUM_PROJECTIONS, sketch
from moeverify.scripts.record.tensors import make_region
from moeverify.verification.compare.comparison import ComparedShard
from moeverify.verification.compare.difference import TensorDifference, measure


@dataclass(frozen=True)
class Sketched:
    """The sum of squares, projections and number of elements of the known part of a tensor."""

    squares: float
    numbers: Sequence[float]
    numel: int


@dataclass
class Comparer:
    """A comparison of a run with another run's logical tensors; gradients are compared before the clip."""

    expected: RecordedRun
    actual: RecordedRun
    places: Places
    _coefficients: dict[tuple[int, int], Coefficient] = field(default_factory=dict)

    def coefficient(self, rank: RankRecord, step: int) -> Coefficient:
        """Return the coefficient of a rank that the comparison undoes; see `find_coefficients`."""
        if (id(rank), step) not in self._coefficients:
            self._coefficients |= find_coefficients(self.expected, self.actual, step)
        return self._coefficients[id(rank), step]

    def compare_tensors(self, step: int, kind: str) -> list[list[ComparedShard]]:
        """Return the entries of every rank for one kind of tensors at one step."""
        by_rank: list[list[ComparedShard]] = [[] for _ in self.actual.ranks]
        for name in self._list_names(step, kind):
            shards = [
                (rank, line) for rank in self.actual.ranks for line in self._lines_of(rank, step, kind, name)
            ]
            if kind == Kind.GRADIENT and self._is_reduced_later(step, shards):
                continue
            whole = self.read_expected(step, kind, name)
            if whole is None or any(line.sketch for _, line in shards):
                entry = self._compare_sketches((step, kind, name), whole, shards)
                by_rank[0] += [entry] if entry is not None else []
                continue
            for rank, line in shards:
                by_rank[rank.rank].append(self._compare(rank, line, name, whole))
        return by_rank

    def compare_numbers(self, step: int) -> list[list[ComparedShard]]:
        """Return the entries of the clip coefficient, and of the gradient norm where both runs have it."""
        wanted = self.coefficient(self.expected.ranks[0], step)
        by_rank: list[list[ComparedShard]] = []
        for rank in self.actual.ranks:
            found = self.coefficient(rank, step)
            pairs = {"coefficient": (wanted.value, found.value)}
            if wanted.norm is not None and found.norm is not None:
                pairs = {"total": (wanted.norm, found.norm), **pairs}
            by_rank.append([_number(step, name, *pair) for name, pair in pairs.items()])
        return by_rank

    def read_expected(self, step: int, kind: str, name: str) -> Tensor | None:
        """Return a whole logical tensor of the expected run; gradients in float64, as before the clip."""
        whole = self.expected.read_whole(kind, name, step)
        if whole is None or kind != Kind.GRADIENT:
            return whole
        return whole.to(torch.float64) / self.coefficient(self.expected.ranks[0], step).value

    def read_actual(self, rank: RankRecord, line: Values) -> Tensor | None:
        """Return a rank's local tensor; gradients in float64, as before the clip."""
        local = rank.read(line)
        if local is None or line.kind != Kind.GRADIENT:
            return local
        return local.to(torch.float64) / self.coefficient(rank, line.step).value

    def _list_names(self, step: int, kind: str) -> list[str]:
        """Return the names of a kind's tensors: parameters, or optimizer states such as `weight.exp_avg`."""
        names = list(dict.fromkeys(each.name for each in self.places.known.values()))
        if kind != Kind.OPTIMIZER_STATE:
            return names
        lines = (key for rank in self.expected.ranks for key in rank.values)
        states = dict.fromkeys(name for at, what, name in lines if (at, what) == (step, kind))
        return [state for state in states if split_state(state)[0] in names]

    def _lines_of(self, rank: RankRecord, step: int, kind: str, name: str) -> Iterator[Values]:
        parameter, suffix = split_state(name) if kind == Kind.OPTIMIZER_STATE else (name, "")
        for (number, own), placed in self.places.known.items():
            line = rank.values.get((step, kind, own + suffix)) if number == rank.rank else None
            if line is not None and placed.name == parameter:
                yield line

    def _is_reduced_later(self, step: int, shards: Sequence[tuple[RankRecord, Values]]) -> bool:
        """Return whether replicas of a gradient differ because the optimizer reduces them within its step."""
        reducing = [rank for rank, _ in shards if rank.find_reduction(step)]
        replicas: dict[str, set[int]] = {}
        for rank, line in shards:
            replicas.setdefault(self._region(rank, line).key, set()).add(line.bits)
        return bool(reducing) and any(len(bits) > 1 for bits in replicas.values())

    def _region(self, rank: RankRecord, line: Values) -> Region:
        """Return the region of a line in the logical tensor; a moment has its parameter's region."""
        name = split_state(line.name)[0] if line.kind == Kind.OPTIMIZER_STATE else line.name
        return self.places.known[rank.rank, name].region

    def _compare_sketches(
        self, key: Key, whole: Tensor | None, shards: Sequence[tuple[RankRecord, Values]]
    ) -> ComparedShard | None:
        """Return the difference of two whole tensors, estimated from sketches because values are missing."""
        if whole is not None:
            region = Region.whole(whole.shape)
            wanted = Sketched(float(whole.double().square().sum()), sketch(whole, region), whole.numel())
        else:
            found = ((rank, line, make_region(line.where)) for rank, line in self.expected.find(key))
            wanted = self._add_sketches(found)
        placed = ((rank, line, self._region(rank, line)) for rank, line in shards)
        own = self._add_sketches(placed)
        if not shards or own.numel != wanted.numel:
            return None
        first = shards[0][1]
        shape = self._region(*shards[0]).shape
        region = Region.whole(shape)
        difference = _estimate(wanted, own)
        return ComparedShard(*key, region.key, shape, shape, "compared", first.bits, difference)

    def _add_sketches(self, shards: Iterable[tuple[RankRecord, Values, Region]]) -> Sketched:
        """Return the combined sketch of the regions, counting each once."""
        total = Sketched(0.0, [0.0] * NUM_PROJECTIONS, 0)
        done: set[str] = set()
        for rank, line, region in shards:
            if line.is_absent or region.key in done:
                continue
            done.add(region.key)
            scale = self.coefficient(rank, line.step).value if line.kind == Kind.GRADIENT else 1.0
            local = rank.read(line)
            numbers = line.sketch if local is None else sketch(local, region)
            added = [first + second / scale for first, second in zip(total.numbers, numbers, strict=True)]
            total = Sketched(total.squares + line.squares / scale**2, added, total.numel + region.numel)
        return total

    def _compare(self, rank: RankRecord, line: Values, name: str, whole: Tensor) -> ComparedShard:
        region = self._region(rank, line)
        local = self.read_actual(rank, line)
        if local is None:
            local = torch.zeros(region.local_shape, dtype=torch.float64)
        difference = _measure(region.take(whole).reshape(region.local_shape), local)
        return ComparedShard(
            line.step,
            line.kind,
            name,
            region.key,
            region.shape,
            region.local_shape,
            "absent" if line.is_absent else "compared",
            line.bits,
            difference,
            region.global_index(int(difference.position)) if difference.max_error > 0 else (),
        )


def split_state(name: str) -> tuple[str, str]:
    """Split the name of a moment: `weight.exp_avg` becomes `weight` and `.exp_avg`."""
    parameter, dot, key = name.rpartition(".")
    return parameter, dot + key


def _measure(expected: Tensor, actual: Tensor) -> TensorDifference:
    return TensorDifference.from_statistics(measure(expected, actual).tolist())


def _estimate(expected: Sketched, actual: Sketched) -> TensorDifference:
    """Return the difference of two whole tensors, estimated by the mean square difference of projections."""
    pairs = zip(expected.numbers, actual.numbers, strict=True)
    error = sum((first - second) ** 2 for first, second in pairs) / NUM_PROJECTIONS
    product = (expected.squares + actual.squares - error) / 2
    num_nonfinite = 0.0 if math.isfinite(actual.squares) else 1.0
    largest = math.sqrt(error)
    return TensorDifference(
        actual.numel, expected.squares, actual.squares, product, error, largest, 0, 0.0, 0.0, num_nonfinite
    )


def _number(step: int, name: str, expected: float, actual: float) -> ComparedShard:
    difference = _measure(torch.tensor([expected]).double(), torch.tensor([actual]).double())
    return ComparedShard(
        step, Kind.GRADIENT_NORM, name, "0:1", (1,), (1,), "compared", hash(actual), difference
    )

"""An observer that compares every shard with the golden on its own rank and keeps only statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from moeverify.parallel.regions.observer import Named
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import UNCOMPARED_KINDS, ZERO_KINDS
from moeverify.triton_support import can_compile
from moeverify.verification.compare.batch import BitFingerprints, Differences
from moeverify.verification.compare.difference import Measured, Read, TensorDifference


class ExpectedValues(Protocol):
    """A source of expected values: a stored golden, or any other object that reads regions."""

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        """Return a region (`region.local_shape`) of a logical tensor on the CPU; None if the tensor does not exist.

        With runs on GPUs, another thread calls this method too.
        """


class _Measurer(Protocol):
    """A way to compare shards: immediately, or asynchronously to the training."""

    def add_all(self, shards: Sequence[tuple[Read, Tensor]]) -> None: ...
    def results(self) -> Iterator[Measured]: ...


@dataclass(frozen=True)
class ComparedShard:
    """The comparison of one shard of one rank.

    `bits` is a hash of the exact local values; replicas of a region must have equal hashes. `state` is
    `compared`, `absent` (the run has no such tensor here), or `unexpected` (the golden has no such tensor).
    `region` is the key of the region, and `shape` the global shape. `index` is the global index of the
    largest difference. With `is_estimated`, the difference was estimated from sketches, and `block` has the
    global indices of the block with the largest error, for each dim.
    """

    step: int
    kind: str
    name: str
    region: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    state: str
    bits: int
    difference: TensorDifference
    index: tuple[int, ...] = ()
    is_estimated: bool = False
    block: tuple[range, ...] = ()


class Comparison:
    """Compares observed shards with a reference; read the results with `entries` after the run.

    On a GPU, shards are compared asynchronously, so that the run never waits for the device.
    """

    def __init__(self, reference: ExpectedValues, *, hash_bits: bool = True) -> None:
        self._reference = reference
        self._hash_bits = hash_bits
        self._pending: list[tuple[int, str, str, Region, bool, tuple[int, ...], _Measurer]] = []
        self._measurers: dict[torch.device, _Measurer] = {}

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Compare one shard; see `moeverify.parallel.regions.observer.Observer`."""
        self.observe_all(step, kind, [(name, local, region)])

    def observe_all(self, step: int, kind: str, shown: Sequence[Named]) -> None:
        """Compare the shards of one kind; see `moeverify.parallel.regions.observer.BulkObserver`."""
        if kind in UNCOMPARED_KINDS:
            return
        by_measurer: dict[_Measurer, list[tuple[Read, Tensor]]] = {}
        for name, local, region in shown:
            local_shape = region.local_shape
            # Zeros in place of a missing tensor: its error is the size of the expected values.
            actual = torch.zeros(local_shape, dtype=torch.float64) if local is None else local.detach()
            actual = actual if actual.shape == local_shape else actual.reshape(local_shape)
            measurer = self._measurers.get(actual.device)
            if measurer is None:
                measurer = self._measurers[actual.device] = _choose_measurer(actual.device, self._hash_bits)
            read = _nothing if kind in ZERO_KINDS else partial(self._reference.read, step, kind, name, region)
            by_measurer.setdefault(measurer, []).append((read, actual))
            self._pending.append((step, kind, name, region, local is None, local_shape, measurer))
        for measurer, shards in by_measurer.items():
            measurer.add_all(shards)

    def begin_step(self, step: int) -> None:
        """Do nothing, because each observation names its step."""

    def entries(self) -> Iterator[ComparedShard]:
        """Yield one entry per shard, in the order of observation."""
        found = {id(measurer): measurer.results() for measurer in self._measurers.values()}
        for step, kind, name, region, absent, local_shape, measurer in self._pending:
            measured = next(found[id(measurer)])
            known = measured.known or kind in ZERO_KINDS
            state = "absent" if absent else "compared" if known else "unexpected"
            difference = TensorDifference.from_statistics(measured.statistics)
            index = region.global_index(int(difference.position)) if difference.max_error > 0 else ()
            yield ComparedShard(
                step,
                kind,
                name,
                region.key,
                region.shape,
                local_shape,
                state,
                measured.bits,
                difference,
                index,
            )


def _nothing() -> None:
    """Return None, the expected value of kinds that are zero by definition."""


def _choose_measurer(device: torch.device, hash_bits: bool) -> _Measurer:
    if can_compile(device):
        from moeverify.verification.compare.gpu.async_compare import AsyncComparison

        return AsyncComparison(device)  # hashes are almost free there
    return _ImmediateComparison(hash_bits)


_TOGETHER = 64  # number of expected shards that are read before a comparison


class _ImmediateComparison:
    """Compares each shard when it is added, and scalars such as step counters at the end.

    With training on a GPU, these scalars are the only CPU tensors. Reading the expected value of each one
    during the training would take longer than keeping a copy.
    """

    def __init__(self, hash_bits: bool) -> None:
        self._differences = Differences()
        self._bits = BitFingerprints() if hash_bits else None
        self._known: list[bool] = []
        self._numbers: list[tuple[Read, Tensor]] = []

    def add_all(self, shards: Sequence[tuple[Read, Tensor]]) -> None:
        if len({(actual.dtype, actual.shape) for _, actual in shards}) == 1 and shards[0][1].ndim == 0:
            copies = torch.stack([actual for _, actual in shards]).unbind()
            self._numbers += [(read, copy) for (read, _), copy in zip(shards, copies, strict=True)]
            return
        self._compare_numbers()
        self._compare(shards)

    def results(self) -> Iterator[Measured]:
        self._compare_numbers()
        rows = self._differences.rows().tolist()
        bits = [0] * len(rows) if self._bits is None else self._bits.values().tolist()
        for row, hashed, known in zip(rows, bits, self._known, strict=True):
            yield Measured(row, hashed, known)

    def _compare_numbers(self) -> None:
        numbers, self._numbers = self._numbers, []
        self._compare(numbers)

    def _compare(self, shards: Sequence[tuple[Read, Tensor]]) -> None:
        for start in range(0, len(shards), _TOGETHER):
            pairs = [(read(), actual) for read, actual in shards[start : start + _TOGETHER]]
            self._known += [expected is not None for expected, _ in pairs]
            self._differences.add_all(pairs)
            if self._bits is not None:
                self._bits.add_all([actual for _, actual in pairs])

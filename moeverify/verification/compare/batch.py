"""Statistics and hashes of many tensors in a few calls, because most tensors of a model are small.

A call of torch costs more than its work on a bias of 64 numbers. Small tensors are therefore copied into
one buffer and measured together. Large tensors are measured alone and in place. The results equal `measure`
and `fingerprint_bits` of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from moeverify.verification.compare.difference import (
    LARGEST,
    NUM_STATISTICS,
    find_worst,
    fingerprint_bits,
    hash_words,
    measure,
    rows_as_words,
)

# Above _SMALL elements the work outweighs the cost of a call. Many smaller tensors fit into a buffer of
# _BUFFER_SIZE elements, which fits into a processor's cache.
_SMALL, _BUFFER_SIZE = 1 << 9, 1 << 15


_Each = TypeVar("_Each")
# Number of elements, dtype, device, and further properties that tensors must share to be copied together.
_Like = tuple[int, torch.dtype, torch.device, object]


class Differences:
    """The results of `measure` for each added pair of tensors."""

    def __init__(self) -> None:
        self._rows = _OrderedResults()
        self._buffers: dict[torch.device, _SmallTensorBuffer] = {}

    def add(self, expected: Tensor | None, actual: Tensor) -> None:
        """Add a pair of equal shape; `expected` None means zeros.

        Later changes of the tensors have no effect.

        Raises: ValueError when the shapes differ.
        """
        self.add_all([(expected, actual)])

    def add_all(self, pairs: Sequence[tuple[Tensor | None, Tensor]]) -> None:
        """Add pairs, and raise errors, as `add` does; consecutive pairs of the same small size need a few calls."""
        for some in _divide(pairs, _describe_pair):
            expected, actual = some[0]
            if expected is not None and expected.shape != actual.shape:
                raise ValueError(f"cannot compare shape {tuple(actual.shape)} with {tuple(expected.shape)}")
            size = actual.numel()
            if size == 0 or size > _SMALL:
                self._rows.put(measure(torch.zeros_like(actual) if expected is None else expected, actual))
                continue
            buffer = self._buffers.get(actual.device)
            if buffer is None:
                buffer = self._buffers[actual.device] = _SmallTensorBuffer(
                    actual.device, torch.float64, 2, _measure_many
                )
            data = buffer.take(size, len(some), self._rows)
            values = [one for one, _ in some if one is not None]
            if values:
                data[0].copy_(_stack(values))
            else:
                data[0].zero_()
            data[1].copy_(_stack([each for _, each in some]))

    def rows(self) -> Tensor:
        """Return (N, NUM_STATISTICS) float64 on the CPU, one row per pair in the order of `add`."""
        return self._rows.all(self._buffers.values(), (NUM_STATISTICS,), torch.float64)


class BitFingerprints:
    """The `fingerprint_bits` of each added tensor."""

    def __init__(self) -> None:
        self._rows = _OrderedResults()
        self._buffers: dict[torch.device, _SmallTensorBuffer] = {}

    def add(self, local: Tensor) -> None:
        """Add a tensor. Later changes of it have no effect."""
        self.add_all([local])

    def add_all(self, shards: Sequence[Tensor]) -> None:
        """Add tensors as `add` does; consecutive tensors of the same small size need only a few calls."""
        for some in _divide(shards, _describe):
            local = some[0]
            size = local.numel()
            if size == 0 or size > _SMALL:
                self._rows.put(fingerprint_bits(local))
                continue
            buffer = self._buffers.get(local.device)
            if buffer is None:
                buffer = self._buffers[local.device] = _SmallTensorBuffer(
                    local.device, torch.int64, 1, _hash_many
                )
            words, rest = rows_as_words(_stack(some))
            num_words = words.shape[1]
            [data] = buffer.take(num_words + rest.shape[1], len(some), self._rows)
            data[:, :num_words].copy_(words)
            data[:, num_words:].copy_(rest)

    def values(self) -> Tensor:
        """Return (N,) int64 on the CPU, one hash per tensor in the order of `add`."""
        return self._rows.all(self._buffers.values(), (), torch.int64)


class _OrderedResults:
    """Results by index, filled in any order."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._numbers: list[int] = []
        self._found: list[Tensor] = []

    def reserve(self) -> int:
        self._num_rows += 1
        return self._num_rows - 1

    def put(self, row: Tensor) -> None:
        self.fill([self.reserve()], row.unsqueeze(0))

    def fill(self, numbers: list[int], rows: Tensor) -> None:
        self._numbers += numbers
        self._found.append(rows)

    def all(self, buffers: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        for buffer in buffers:  # type: ignore[attr-defined]
            buffer.empty(self)
        rows = torch.empty((self._num_rows, *shape), dtype=dtype)
        if self._found:
            rows[torch.tensor(self._numbers)] = torch.cat([found.cpu() for found in self._found])
        return rows


class _SmallTensorBuffer:
    """A buffer in which small tensors of one device wait until it is full."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        num_rows: int,
        work: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.data = torch.empty((num_rows, _BUFFER_SIZE), dtype=dtype, device=device)
        self._work = work
        self._numbers: list[int] = []
        self._sizes: list[int] = []
        self._used = 0

    def take(self, size: int, count: int, rows: _OrderedResults) -> Tensor:
        """Return writable space for `count` tensors of `size` elements: (num_rows, count, size)."""
        if self._used + size * count > _BUFFER_SIZE:
            self.empty(rows)
        start = self._used
        self._used += size * count
        self._sizes += [size] * count
        self._numbers += [rows.reserve() for _ in range(count)]
        return self.data[:, start : self._used].view(-1, count, size)

    def empty(self, rows: _OrderedResults) -> None:
        if self._sizes:
            sizes = torch.tensor(self._sizes, device=self.data.device)
            rows.fill(self._numbers, self._work(self.data[:, : self._used], sizes))
        self._numbers, self._sizes, self._used = [], [], 0


def _divide(tensors: Sequence[_Each], describe: Callable[[_Each], _Like]) -> Iterator[list[_Each]]:
    """Yield runs of consecutive tensors that are alike: as many small ones as fit a buffer, or one large one."""
    for (size, *_), alike in groupby(tensors, describe):
        most = _BUFFER_SIZE // size if 0 < size <= _SMALL else 1
        members = list(alike)
        for start in range(0, len(members), most):
            yield members[start : start + most]


def _describe(local: Tensor) -> _Like:
    return local.numel(), local.dtype, local.device, None


def _describe_pair(pair: tuple[Tensor | None, Tensor]) -> _Like:
    expected, actual = pair
    shapes = None if expected is None else (expected.dtype, expected.shape, actual.shape)
    return actual.numel(), actual.dtype, actual.device, shapes


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one size, one row per tensor."""
    return torch.stack([each.detach().reshape(-1) for each in tensors])


def _measure_many(data: Tensor, sizes: Tensor) -> Tensor:
    """Return (N, NUM_STATISTICS) for segments of data (2, M), expected and actual. Shape: sizes (N,)."""
    e, a = data
    error = a - e
    size = error.abs()
    # NaN fails the comparison, and its negation counts it.
    sums = torch.stack([e * e, a * a, e * a, error * error, (~(size <= LARGEST)).to(torch.float64)], dim=1)
    sums = torch.segment_reduce(sums, "sum", lengths=sizes, axis=0)
    worst = find_worst(size, sizes)
    starts = sizes.cumsum(0) - sizes
    columns = [sizes.to(torch.float64), *sums.unbind(1)[:4], size[worst], (worst - starts).to(torch.float64)]
    return torch.stack([*columns, e[worst], a[worst], sums[:, 4]], dim=1)


def _hash_many(data: Tensor, sizes: Tensor) -> Tensor:
    """Return the hash (N,) of each segment of the words in data (1, M). Shape: sizes (N,)."""
    words = data[0]
    ends = sizes.cumsum(0)
    place = torch.arange(len(words), device=words.device) - (ends - sizes).repeat_interleave(sizes)
    # Sums of int64 wrap around, so the difference of two running sums is exact.
    running = hash_words(words, place).cumsum(0)
    total = running[ends - 1]
    total[1:] -= running[ends[:-1] - 1]
    return total

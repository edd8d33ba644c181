"""Statistics and hashes of many tensors in a few calls: most tensors of a model are small.

A call of torch costs more than its work on a bias of 64 numbers. Small tensors are therefore copied one behind the
other and measured together; large ones are measured alone, where they are. Both give what `measure` and
`fingerprint_bits` give.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeverify.compare.difference import (
    LARGEST,
    NUM_STATISTICS,
    as_words,
    find_worst,
    fingerprint_bits,
    hash_words,
    measure,
)

# Above this many elements the work outweighs the calls; below it, so many of them fit into a processor's cache.
_SMALL, _ROOM = 1 << 9, 1 << 15


class Differences:
    """What `measure` says of each pair of tensors that was added."""

    def __init__(self) -> None:
        self._rows = _Rows()
        self._rooms: dict[torch.device, _Room] = {}

    def add(self, expected: Tensor | None, actual: Tensor) -> None:
        """Take a pair of equal shape; no `expected` stands for zeros. Later changes of either do not matter."""
        if expected is not None and expected.shape != actual.shape:
            raise ValueError(f"cannot compare shape {tuple(actual.shape)} with {tuple(expected.shape)}")
        size = actual.numel()
        if size == 0 or size > _SMALL:
            self._rows.put(measure(torch.zeros_like(actual) if expected is None else expected, actual))
            return
        room = self._rooms.get(actual.device)
        if room is None:
            room = self._rooms[actual.device] = _Room(actual.device, torch.float64, 2, _measure_many)
        start = room.take(size, self._rows)
        if expected is None:
            room.data[0, start : start + size].zero_()
        else:
            room.data[0, start : start + size].copy_(expected.reshape(-1))
        room.data[1, start : start + size].copy_(actual.reshape(-1))

    def rows(self) -> Tensor:
        """Return (N, NUM_STATISTICS) float64 on the CPU, one row for each pair in the order of `add`."""
        return self._rows.all(self._rooms.values(), (NUM_STATISTICS,), torch.float64)


class Fingerprints:
    """The `fingerprint_bits` of each tensor that was added."""

    def __init__(self) -> None:
        self._rows = _Rows()
        self._rooms: dict[torch.device, _Room] = {}

    def add(self, local: Tensor) -> None:
        """Take a tensor; later changes of it do not matter."""
        size = local.numel()
        if size == 0 or size > _SMALL:
            self._rows.put(fingerprint_bits(local))
            return
        room = self._rooms.get(local.device)
        if room is None:
            room = self._rooms[local.device] = _Room(local.device, torch.int64, 1, _hash_many)
        words, rest = as_words(local)
        num_words = words.numel()
        size = num_words + rest.numel()
        start = room.take(size, self._rows)
        if num_words:
            room.data[0, start : start + num_words].copy_(words)
        if size > num_words:
            room.data[0, start + num_words : start + size].copy_(rest)

    def values(self) -> Tensor:
        """Return (N,) int64 on the CPU, one hash for each tensor in the order of `add`."""
        return self._rows.all(self._rooms.values(), (), torch.int64)


class _Rows:
    """Results in the order of their numbers, whenever they come."""

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

    def all(self, rooms: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        for room in rooms:  # type: ignore[attr-defined]
            room.empty(self)
        rows = torch.empty((self._num_rows, *shape), dtype=dtype)
        if self._found:
            rows[torch.tensor(self._numbers)] = torch.cat([found.cpu() for found in self._found])
        return rows


class _Room:
    """Where small tensors of one device wait until there are enough of them."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        num_rows: int,
        work: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.data = torch.empty((num_rows, _ROOM), dtype=dtype, device=device)
        self._work = work
        self._numbers: list[int] = []
        self._sizes: list[int] = []
        self._used = 0

    def take(self, size: int, rows: _Rows) -> int:
        """Return where `size` elements may be written, for the next of the rows."""
        if self._used + size > _ROOM:
            self.empty(rows)
        start = self._used
        self._used += size
        self._sizes.append(size)
        self._numbers.append(rows.reserve())
        return start

    def empty(self, rows: _Rows) -> None:
        if self._sizes:
            sizes = torch.tensor(self._sizes, device=self.data.device)
            rows.fill(self._numbers, self._work(self.data[:, : self._used], sizes))
        self._numbers, self._sizes, self._used = [], [], 0


def _measure_many(data: Tensor, sizes: Tensor) -> Tensor:
    """Return (N, NUM_STATISTICS) for segments of data (2, M): expected and actual, `sizes` (N,) elements each."""
    e, a = data
    error = a - e
    size = error.abs()
    sums = torch.stack([e * e, a * a, e * a, error * error, (~(size <= LARGEST)).to(torch.float64)], dim=1)
    sums = torch.segment_reduce(sums, "sum", lengths=sizes, axis=0)
    worst = find_worst(size, sizes)
    starts = sizes.cumsum(0) - sizes
    columns = [sizes.to(torch.float64), *sums.unbind(1)[:4], size[worst], (worst - starts).to(torch.float64)]
    return torch.stack([*columns, e[worst], a[worst], sums[:, 4]], dim=1)


def _hash_many(data: Tensor, sizes: Tensor) -> Tensor:
    """Return the hash of each segment of the words in data (1, M), `sizes` (N,) words each."""
    words = data[0]
    ends = sizes.cumsum(0)
    place = torch.arange(len(words), device=words.device) - (ends - sizes).repeat_interleave(sizes)
    # Sums of int64 wrap, so the difference of two running sums is exact.
    running = hash_words(words, place).cumsum(0)
    total = running[ends - 1]
    total[1:] -= running[ends[:-1] - 1]
    return total

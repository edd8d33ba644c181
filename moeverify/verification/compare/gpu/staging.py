"""Batches: expected values of many shards and their tables, in one block of memory for one launch.

    | values of part 0 | values of part 1 | ... | padding to 8 bytes | rows of `measured` | rows of `hashed` |

The block is copied to the device unchanged. All work on it uses NumPy, because torch operations in another
thread would take the interpreter lock away from the training thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeverify.verification.compare.difference import Read
from moeverify.verification.compare.gpu.hash_kernel import WORDS
from moeverify.verification.compare.gpu.kernels import SPAN, Tables

Integers = np.ndarray[Any, np.dtype[np.int64]]
Values = np.ndarray[Any, Any]

ROOM = 1 << 25  # bytes of a batch, values and tables
TABLES = 1 << 18  # bytes of the tables: one row per full span and one per part, in both tables
_VALUES = ROOM - TABLES  # bytes of expected values; values that are zero count too
_MOST = 512  # parts of a batch, whose table rows fit beside the rows of full spans


@dataclass(frozen=True)
class StagedShard:
    """A copy of a shard on the device, and the function that reads its expected values."""

    number: int
    read: Read
    copy: Tensor


@dataclass(frozen=True)
class _Part:
    """Elements [first, first + size) of a shard in row-major order, with the expected values (None: zeros).

    The values may have any strides, because they are views of the golden's mapped file.
    """

    shard: StagedShard
    first: int
    size: int
    expected: Values | None


@dataclass(frozen=True)
class Packed:
    """A batch of `size` bytes in memory, and the shard of each table row.

    Shapes: `measured` and `hashed` (rows,), the shard numbers.
    """

    tables: Tables
    size: int
    measured: Integers
    hashed: Integers


@dataclass
class StagedBatch:
    """Parts of shards with one pair of dtypes. The shards are complete after the events in `ready`."""

    dtype: torch.dtype
    expected_dtype: torch.dtype
    ready: set[Any] = field(default_factory=set)
    num_elements: int = 0
    _parts: list[_Part] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)  # offsets of the expected values; -1: zeros
    _num_expected: int = 0

    @property
    def room(self) -> int:
        """Return how many more elements fit."""
        return _capacity(self.expected_dtype) - self.num_elements if len(self._parts) < _MOST else 0

    def add(self, shard: StagedShard, first: int, size: int, expected: Values | None, ready: Any) -> None:
        """Add elements of a shard."""
        self._places.append(-1 if expected is None else self._num_expected)
        self._parts.append(_Part(shard, first, size, expected))
        self.ready.add(ready)
        self.num_elements += size
        if expected is not None:
            self._num_expected += size

    def read(self, memory: Values) -> None:
        """Write the expected values to the start of `memory` (bytes)."""
        for part, place in zip(self._parts, self._places, strict=True):
            if part.expected is not None and part.size:
                size = part.expected.itemsize
                room = memory[place * size : (place + part.size) * size].view(part.expected.dtype)
                np.copyto(room.reshape(part.expected.shape), part.expected)

    def pack(self, memory: Values) -> Packed:
        """Write the tables after the expected values."""
        measured, hashed = self._tabulate_values(), self._tabulate_words()
        start = -(-self._num_expected * self.expected_dtype.itemsize // 8)
        tables = Tables(start, len(measured), start + 4 * len(measured), len(hashed))
        stop = tables.hashed + 5 * len(hashed)
        integers: Integers = memory.view(np.int64)
        integers[start : tables.hashed] = measured[:, 1:].reshape(-1)
        integers[tables.hashed : stop] = hashed[:, 1:].reshape(-1)
        return Packed(tables, 8 * stop, measured[:, 0], hashed[:, 0])

    def _tabulate_values(self) -> Integers:
        """Return the spans of elements, (N, 5): the shard number, then the columns of `Tables.measured`."""
        number, start, first, size, _, place = self._describe_parts()
        part, offset = _divide_evenly(size, SPAN)
        behind = np.where(place[part] >= 0, place[part] + offset, -1)
        address = start[part] + (first[part] + offset) * self.dtype.itemsize
        length = np.minimum(size[part] - offset, SPAN)
        return np.stack([number[part], address, behind, length, first[part] + offset], axis=1)

    def _tabulate_words(self) -> Integers:
        """Return the spans of words that end in the parts, (M, 6): the shard number, then `Tables.hashed`.

        If a shard is split between two batches, a word across the split belongs to the later one. The
        remaining elements after the last whole word belong to the last row of the shard.
        """
        number, start, first, size, numel, _ = self._describe_parts()
        per_word = max(8 // self.dtype.itemsize, 1)
        stop = first + size
        first, last = first // per_word, stop // per_word
        rest = np.where(stop == numel, stop - last * per_word, 0)
        # A part with only remaining elements has a row too.
        part, offset = _divide_evenly(np.maximum(last - first, rest > 0), WORDS)
        offset = offset + first[part]
        is_last = np.append(part[1:] != part[:-1], True)[: len(part)]
        rest_at = np.where(is_last, start[part] + last[part] * 8, 0)
        num_words = np.minimum(last[part] - offset, WORDS)
        columns = (number[part], start[part] + offset * 8, num_words, offset, rest_at, is_last * rest[part])
        return np.stack(columns, axis=1)

    def _describe_parts(self) -> Integers:
        """Return shard number, address, first, size, shard size and place of each part, as (6, parts).

        One array holds all parts, because a NumPy call per part would take the interpreter lock from the
        training.
        """
        parts = zip(self._parts, self._places, strict=True)
        rows = [
            (
                each.shard.number,
                each.shard.copy.data_ptr(),
                each.first,
                each.size,
                each.shard.copy.numel(),
                place,
            )
            for each, place in parts
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 6).T


def _divide_evenly(sizes: Integers, most: int) -> tuple[Integers, Integers]:
    """Return the part and the offset within it, (N) and (N), of each span of `most` elements."""
    counts = -(-sizes // most)
    part = np.repeat(np.arange(len(sizes)), counts)
    before = counts.cumsum() - counts
    return part, (np.arange(len(part)) - before[part]) * most


class OpenBatches:
    """The open batch of each pair of dtypes."""

    def __init__(self) -> None:
        self._open: dict[tuple[torch.dtype, torch.dtype], StagedBatch] = {}

    def put(self, shard: StagedShard, expected: Tensor | None, ready: Any) -> Iterator[StagedBatch]:
        """Add a shard, in parts if it is large, and yield the full batches."""
        if expected is None:
            yield from self._put(shard, 0, shard.copy.numel(), None, torch.float64, ready)
            return
        values, dtype = _as_array(expected)
        first = 0
        for some in _divide(values, _capacity(dtype)):
            yield from self._put(shard, first, some.size, some, dtype, ready)
            first += some.size

    def _put(
        self,
        shard: StagedShard,
        first: int,
        size: int,
        expected: Values | None,
        expected_dtype: torch.dtype,
        ready: Any,
    ) -> Iterator[StagedBatch]:
        """Add elements to the open batch and the following ones; non-contiguous values stay together."""
        key = (shard.copy.dtype, expected_dtype)
        flat = expected.reshape(-1) if expected is not None and expected.flags.c_contiguous else None
        divisible = expected is None or flat is not None
        behind = 0
        while True:
            batch = self._open.setdefault(key, StagedBatch(*key))
            left = size - behind
            fits = min(left, batch.room)
            if fits < left and (fits == 0 or not divisible):
                yield self._open.pop(key)
                continue
            some = expected if flat is None else flat[behind : behind + fits]
            batch.add(shard, first + behind, fits, some, ready)
            behind += fits
            if behind == size:
                return

    def rest(self) -> Iterator[StagedBatch]:
        """Yield the batches that are not full."""
        while self._open:
            yield self._open.popitem()[1]


def _as_array(values: Tensor) -> tuple[Values, torch.dtype]:
    """Return the values as a NumPy array, and the dtype with which the device reads them."""
    if values.dtype is torch.bool:
        return values.view(torch.uint8).numpy(), torch.uint8
    if values.dtype is torch.bfloat16:  # NumPy has no bfloat16, so use the bits
        return values.view(torch.int16).numpy(), torch.bfloat16
    return values.numpy(), values.dtype


def _capacity(dtype: torch.dtype) -> int:
    """Return how many elements fit into a batch whose expected values have this dtype."""
    # The tables have a row per SPAN values and per WORDS words. With less than 2 bytes per value they would
    # not fit.
    return _VALUES // max(dtype.itemsize, 2)


def _divide(values: Values, most: int) -> Iterator[Values]:
    """Yield views in row-major order that are contiguous or have at most `most` elements."""
    if values.size <= most or values.flags.c_contiguous:
        yield values
        return
    rows = most // max(values[0].size, 1)
    for first in range(0, len(values), max(rows, 1)):
        yield from _divide(values[first : first + rows] if rows else values[first], most)

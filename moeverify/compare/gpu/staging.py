"""Batches: the expected values of parts of many shards and their tables, in one block of memory for one launch.

    | values of part 0 | values of part 1 | ... | padding to 8 bytes | rows of `measured` | rows of `hashed` |

The block goes to the device as it is. All work on it is NumPy's: each of torch's operations in another thread than
that of the training would take the interpreter's lock away from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeverify.compare.difference import Read
from moeverify.compare.gpu.kernels import SPAN, WORDS, Tables

Integers = np.ndarray[Any, np.dtype[np.int64]]
Values = np.ndarray[Any, Any]

ROOM = 1 << 25  # bytes of a batch: values and tables
TABLES = 1 << 18  # bytes that the tables fit into: a row for each full span and each part, twice
_VALUES = ROOM - TABLES  # bytes of expected values; those that are zero count too
_MOST = 512  # parts of a batch: the tables have room for their rows beside those of full spans


@dataclass(frozen=True)
class StagedShard:
    """A copy of a shard on the device, and what reads its expected values (None: there are none)."""

    number: int
    read: Read
    copy: Tensor


@dataclass(frozen=True)
class _Part:
    """Elements [first, first + size) of a shard in row-major order, with the expected values (None: zeros).

    The values may have any strides: they are views of the golden's mapped file.
    """

    shard: StagedShard
    first: int
    size: int
    expected: Values | None


@dataclass(frozen=True)
class Packed:
    """A batch in memory, `size` bytes, and the shard to which each row of its tables belongs.

    Shapes: `measured` and `hashed` (rows,), the numbers of shards.
    """

    tables: Tables
    size: int
    measured: Integers
    hashed: Integers


@dataclass
class Batch:
    """Parts of shards of one pair of dtypes. The shards are complete after the events in `ready`."""

    dtype: torch.dtype
    expected_dtype: torch.dtype
    ready: set[Any] = field(default_factory=set)
    num_elements: int = 0
    _parts: list[_Part] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)  # of expected values behind each other; -1: nowhere
    _num_expected: int = 0

    @property
    def room(self) -> int:
        """Return how many elements it can still take."""
        return _capacity(self.expected_dtype) - self.num_elements if len(self._parts) < _MOST else 0

    def add(self, shard: StagedShard, first: int, size: int, expected: Values | None, ready: Any) -> None:
        """Take elements of a shard."""
        self._places.append(-1 if expected is None else self._num_expected)
        self._parts.append(_Part(shard, first, size, expected))
        self.ready.add(ready)
        self.num_elements += size
        if expected is not None:
            self._num_expected += size

    def read(self, memory: Values) -> None:
        """Write the expected values to the beginning of the memory (bytes)."""
        for part, place in zip(self._parts, self._places, strict=True):
            if part.expected is not None and part.size:
                size = part.expected.itemsize
                room = memory[place * size : (place + part.size) * size].view(part.expected.dtype)
                np.copyto(room.reshape(part.expected.shape), part.expected)

    def pack(self, memory: Values) -> Packed:
        """Write the tables behind the expected values."""
        measured, hashed = self._tabulate_values(), self._tabulate_words()
        start = -(-self._num_expected * self.expected_dtype.itemsize // 8)
        tables = Tables(start, len(measured), start + 4 * len(measured), len(hashed))
        stop = tables.hashed + 5 * len(hashed)
        integers: Integers = memory.view(np.int64)
        integers[start : tables.hashed] = measured[:, 1:].reshape(-1)
        integers[tables.hashed : stop] = hashed[:, 1:].reshape(-1)
        return Packed(tables, 8 * stop, measured[:, 0], hashed[:, 0])

    def _tabulate_values(self) -> Integers:
        """Return the spans of the elements: (N, 5), the number of the shard before what `Tables` says."""
        number, start, first, size, _, place = self._describe_parts()
        part, offset = _divide_evenly(size, SPAN)
        behind = np.where(place[part] >= 0, place[part] + offset, -1)
        address = start[part] + (first[part] + offset) * self.dtype.itemsize
        length = np.minimum(size[part] - offset, SPAN)
        return np.stack([number[part], address, behind, length, first[part] + offset], axis=1)

    def _tabulate_words(self) -> Integers:
        """Return the spans of the words of eight bytes, those that end in the parts: (M, 6), likewise.

        Where a shard is cut between two batches, the word across the cut belongs to the later one. What is left of a
        shard behind its last whole word goes into the last of its rows.
        """
        number, start, first, size, numel, _ = self._describe_parts()
        per_word = max(8 // self.dtype.itemsize, 1)
        stop = first + size
        first, last = first // per_word, stop // per_word
        rest = np.where(stop == numel, stop - last * per_word, 0)
        # What has a rest alone has a row too.
        part, offset = _divide_evenly(np.maximum(last - first, rest > 0), WORDS)
        offset = offset + first[part]
        is_last = np.append(part[1:] != part[:-1], True)[: len(part)]
        rest_at = np.where(is_last, start[part] + last[part] * 8, 0)
        num_words = np.minimum(last[part] - offset, WORDS)
        columns = (number[part], start[part] + offset * 8, num_words, offset, rest_at, is_last * rest[part])
        return np.stack(columns, axis=1)

    def _describe_parts(self) -> Integers:
        """Return of each part, (6, parts): its shard's number, address and size, and its own first, size and place.

        In one array: a call of NumPy for each part would take the interpreter's lock from the training.
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
    """Return of each span of `most` elements its part and its offset in that, for parts of these sizes: (N), (N)."""
    counts = -(-sizes // most)
    part = np.repeat(np.arange(len(sizes)), counts)
    before = counts.cumsum() - counts
    return part, (np.arange(len(part)) - before[part]) * most


class Packing:
    """The open batch of each pair of dtypes."""

    def __init__(self) -> None:
        self._open: dict[tuple[torch.dtype, torch.dtype], Batch] = {}

    def put(self, shard: StagedShard, expected: Tensor | None, ready: Any) -> Iterator[Batch]:
        """Take a shard, in parts where it is large, and yield the batches that are full."""
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
    ) -> Iterator[Batch]:
        """Put elements into the open batch, and into the next ones; values with gaps between them stay together."""
        key = (shard.copy.dtype, expected_dtype)
        flat = expected.reshape(-1) if expected is not None and expected.flags.c_contiguous else None
        divisible = expected is None or flat is not None
        behind = 0
        while True:
            batch = self._open.setdefault(key, Batch(*key))
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

    def rest(self) -> Iterator[Batch]:
        """Yield the batches that are not full."""
        while self._open:
            yield self._open.popitem()[1]


def _as_array(values: Tensor) -> tuple[Values, torch.dtype]:
    """Return values as NumPy's, and the dtype that the device is to take them for."""
    if values.dtype is torch.bool:
        return values.view(torch.uint8).numpy(), torch.uint8
    if values.dtype is torch.bfloat16:  # unknown to NumPy: its bits
        return values.view(torch.int16).numpy(), torch.bfloat16
    return values.numpy(), values.dtype


def _capacity(dtype: torch.dtype) -> int:
    """Return how many elements a batch takes whose expected values have this dtype."""
    # A row for each SPAN of values and each WORDS of words: with less than 2 bytes a value tables would not fit.
    return _VALUES // max(dtype.itemsize, 2)


def _divide(values: Values, most: int) -> Iterator[Values]:
    """Yield parts that have at most `most` elements or can be divided anywhere, in row-major order, as views."""
    if values.size <= most or values.flags.c_contiguous:
        yield values
        return
    rows = most // max(values[0].size, 1)
    for first in range(0, len(values), max(rows, 1)):
        yield from _divide(values[first : first + rows] if rows else values[first], most)

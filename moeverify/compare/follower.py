"""Comparing behind a training that goes on: nothing on its way waits for the golden, the disk or the device.

What is observed on a GPU is copied there, and the training continues. A thread collects such pieces into batches;
others read the golden's values for them into pinned memory; from there a batch goes to the GPU, where one launch
compares it, on a stream of its own. So the golden crosses the bus while the next step computes.

Between two syncs with its device the training needs the interpreter's lock, and each of torch's operations in another
thread takes it away twice. So these threads work on NumPy's arrays and call torch a few times for each batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeverify.compare.difference import NUM_STATISTICS, Measured, merge_rows
from moeverify.compare.kernels import SPAN, WORDS, Tables, compare_spans, is_known

Read = Callable[[], Tensor | None]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Values = np.ndarray[Any, Any]

_ROOM = 1 << 25  # bytes of a batch on its way: values and tables
_MOST = 512  # parts of a batch
_TABLES = 1 << 18  # bytes that the tables of a batch fit into: a row for each full span and each part, twice
_VALUES = _ROOM - _TABLES  # bytes of expected values in a batch; those that are zero count too
_HANDED, _ENOUGH = 64, 1 << 22  # pieces, or elements, that are handed over at once
_READERS = 6  # threads; one alone reads 5 to 10 GB/s from the system's cache of files
_WAYS = 8  # batches that are on their way at a time
# Bytes that copies may take on the GPU before the training has to wait: of what its own peak has been, and at least.
_SHARE, _LEAST = 0.05, 1 << 26


@dataclass(frozen=True)
class _Piece:
    """A copy of what was observed, and where its expected values come from."""

    number: int
    read: Read
    copy: Tensor


@dataclass(frozen=True)
class _Part:
    """Elements of a copy that begin at the element `first`, with the expected values of any strides (None: zeros)."""

    piece: _Piece
    first: int
    size: int
    expected: Values | None


@dataclass
class _Batch:
    """Parts of one pair of dtypes, and where their expected values lie behind each other (-1: nowhere).

    The copies are complete after `ready`.
    """

    dtype: torch.dtype
    expected_dtype: torch.dtype
    ready: set[Any] = field(default_factory=set)
    parts: list[_Part] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    num_expected: int = 0
    num_elements: int = 0

    @property
    def room(self) -> int:
        """Return how many elements it can still take."""
        return _capacity(self.expected_dtype) - self.num_elements if len(self.parts) < _MOST else 0

    def add(self, part: _Part) -> None:
        self.places.append(-1 if part.expected is None else self.num_expected)
        self.parts.append(part)
        self.num_elements += part.size
        if part.expected is not None:
            self.num_expected += part.size

    def read(self, memory: Values) -> None:
        """Write the expected values to the beginning of the memory (bytes)."""
        for part, place in zip(self.parts, self.places, strict=True):
            if part.expected is not None and part.size:
                size = part.expected.itemsize
                room = memory[place * size : (place + part.size) * size].view(part.expected.dtype)
                np.copyto(room.reshape(part.expected.shape), part.expected)


class _Slot:
    """Pinned memory for one batch on its way, as torch and as NumPy see it."""

    def __init__(self, *, pinned: bool) -> None:
        self.memory = torch.empty(_ROOM, dtype=torch.uint8, pin_memory=pinned)
        self.array: Values = self.memory.numpy()


@dataclass(frozen=True)
class _Reading:
    batch: _Batch
    slot: _Slot
    done: Future[None]


@dataclass(frozen=True)
class _Running:
    batch: _Batch  # keeps the copies alive until the device has read them
    slot: _Slot
    done: Any


class Follower:
    """Compares the pieces of one device in the order of `add`; `results` waits for all of them.

    Raises: what reading the golden raises, from `results` or a later `add`.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._on_gpu = device.type == "cuda"
        index = torch.cuda.current_device() if self._on_gpu and device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._stream = self._module.Stream()
        self._staging = torch.empty(_ROOM, dtype=torch.uint8, device=self._device)
        self._out = torch.empty(NUM_STATISTICS * _TABLES // 32, dtype=torch.float64, device=self._device)
        # A new thread's device is the first one, whatever that of its maker is.
        self._collector, self._readers = (
            ThreadPoolExecutor(count, name, self._module.set_device, (self._device,))
            for count, name in ((1, "collect"), (_READERS, "read"))
        )
        # Of the thread that trains:
        self._num_pieces = 0
        self._gathered: list[_Piece] = []
        self._num_gathered = 0
        self._jobs: deque[Future[None]] = deque()
        self._limit = _LEAST
        # Of both:
        self._lock = threading.Lock()
        self._copied = 0  # bytes of copies that are not known to have been compared
        # Of the collector:
        self._open: dict[tuple[torch.dtype, torch.dtype], _Batch] = {}
        self._slots: list[_Slot] = []
        self._num_slots = 0
        self._reading: deque[_Reading] = deque()
        self._running: deque[_Running] = deque()
        self._views = {torch.uint8: self._staging}
        self._results = _Results(pinned=self._on_gpu)
        self._unknown: set[int] = set()

    def add(self, read: Read, actual: Tensor) -> None:
        """Take a piece; `read` returns what is expected (of its shape, on the CPU), or None where nothing is.

        Later changes of `actual` do not matter. Waits only where copies would take more memory than they may.
        """
        if is_known(actual.dtype):
            copy = torch.clone(actual, memory_format=torch.contiguous_format)
        else:
            copy = actual.to(torch.float64, memory_format=torch.contiguous_format)
        self._gathered.append(_Piece(self._num_pieces, read, copy))
        self._num_pieces += 1
        self._num_gathered += copy.numel()
        with self._lock:
            self._copied += copy.nbytes
            full = self._copied > self._limit
        if full or self._num_gathered >= _ENOUGH or len(self._gathered) >= _HANDED:
            self._hand_over()
        if full:
            self._wait_for_room()

    def results(self) -> Iterator[Measured]:
        """Yield what came out, in the order of `add`."""
        self._hand_over()
        self._collector.submit(self._finish).result()
        for job in self._jobs:
            job.result()
        statistics, hashes = self._results.merge(self._num_pieces)
        for number, (row, bits) in enumerate(zip(statistics.tolist(), hashes.tolist(), strict=True)):
            yield Measured(row, bits, number not in self._unknown)

    def _hand_over(self) -> None:
        """Give the collector what was gathered."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        if self._gathered:
            ready = self._module.Event()
            ready.record()
            self._jobs.append(self._collector.submit(self._take, self._gathered, ready))
            self._gathered, self._num_gathered = [], 0

    def _wait_for_room(self) -> None:
        if self._on_gpu:
            self._limit = max(_LEAST, int(_SHARE * torch.cuda.max_memory_allocated(self._device)))
        with self._lock:
            full = self._copied > self._limit
        if full:
            self._collector.submit(self._finish).result()

    def _take(self, pieces: list[_Piece], ready: Any) -> None:
        """Put pieces into the open batches of their dtypes."""
        for piece in pieces:
            expected = piece.read()
            if expected is None:
                self._unknown.add(piece.number)
                self._put(piece, 0, piece.copy.numel(), None, torch.float64, ready)
            elif expected.shape != piece.copy.shape:
                wanted, found = tuple(expected.shape), tuple(piece.copy.shape)
                raise ValueError(f"cannot compare shape {found} with {wanted}")
            else:
                values, dtype = _as_array(expected)
                first = 0
                for some in _divide(values, _capacity(dtype)):
                    self._put(piece, first, some.size, some, dtype, ready)
                    first += some.size

    def _put(
        self,
        piece: _Piece,
        first: int,
        size: int,
        expected: Values | None,
        expected_dtype: torch.dtype,
        ready: Any,
    ) -> None:
        """Put elements into the open batch of their dtypes, and into the next ones where it becomes full.

        Values that do not lie behind each other stay together.
        """
        key = (piece.copy.dtype, expected_dtype)
        flat = expected.reshape(-1) if expected is not None and expected.flags.c_contiguous else None
        behind = 0
        while True:
            batch = self._open.setdefault(key, _Batch(*key))
            whole = expected is not None and flat is None
            fits = min(size - behind, batch.room)
            if fits < size - behind and (whole or fits == 0):
                self._close(key)
                continue
            values = expected if flat is None else flat[behind : behind + fits]
            batch.add(_Part(piece, first + behind, fits, values))
            batch.ready.add(ready)
            behind += fits
            if behind == size:
                return

    def _close(self, key: tuple[torch.dtype, torch.dtype]) -> None:
        """Let the readers begin with a batch, and compare those that have been read."""
        batch = self._open.pop(key)
        while self._running and self._running[0].done.query():
            self._retire()
        while not self._slots and self._num_slots == _WAYS:
            if self._running:
                self._retire()
            else:
                self._compare()
        if not self._slots:
            self._slots.append(_Slot(pinned=self._on_gpu))
            self._num_slots += 1
        slot = self._slots.pop()
        self._reading.append(_Reading(batch, slot, self._readers.submit(batch.read, slot.array)))
        while self._reading and self._reading[0].done.done():
            self._compare()

    def _compare(self) -> None:
        """Give the oldest batch that is read to the device."""
        reading = self._reading.popleft()
        batch, slot = reading.batch, reading.slot
        measured, hashed = _tabulate_values(batch), _tabulate_words(batch)
        start = -(-batch.num_expected * batch.expected_dtype.itemsize // 8)
        tables = Tables(start, len(measured), start + 4 * len(measured), len(hashed))
        stop = tables.hashed + 5 * len(hashed)
        reading.done.result()
        memory: Integers = slot.array.view(np.int64)
        memory[start : tables.hashed] = measured[:, 1:].reshape(-1)
        memory[tables.hashed : stop] = hashed[:, 1:].reshape(-1)
        with self._module.stream(self._stream):
            for ready in batch.ready:
                self._stream.wait_event(ready)
            self._staging[: 8 * stop].copy_(slot.memory[: 8 * stop], non_blocking=True)
            if tables.num_results:
                expected = self._view(batch.expected_dtype)
                compare_spans(self._view(torch.int64), tables, expected, batch.dtype, self._out)
                self._results.put(measured[:, 0], hashed[:, 0], self._out[: tables.num_results])
            done = self._make_event()
            done.record()
        self._running.append(_Running(batch, slot, done))

    def _make_event(self) -> Any:
        """Return an event that a thread can wait for without keeping a core busy."""
        if self._on_gpu:
            return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return self._module.Event()

    def _view(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._views:
            self._views[dtype] = self._staging.view(dtype)
        return self._views[dtype]

    def _retire(self) -> None:
        """Wait for the oldest batch on the device."""
        running = self._running.popleft()
        running.done.synchronize()
        self._slots.append(running.slot)
        with self._lock:
            self._copied -= running.batch.num_elements * running.batch.dtype.itemsize

    def _finish(self) -> None:
        """Compare all that was taken."""
        for key in list(self._open):
            self._close(key)
        while self._reading:
            self._compare()
        while self._running:
            self._retire()


def _as_array(values: Tensor) -> tuple[Values, torch.dtype]:
    """Return values as NumPy's, and the dtype that the device is to take them for."""
    if values.dtype is torch.bool:
        return values.view(torch.uint8).numpy(), torch.uint8
    if values.dtype is torch.bfloat16:  # unknown to NumPy: its bits
        return values.view(torch.int16).numpy(), torch.bfloat16
    return values.numpy(), values.dtype


def _capacity(dtype: torch.dtype) -> int:
    """Return how many elements a batch takes whose expected values have this dtype."""
    return _VALUES // max(dtype.itemsize, 2)  # more would not leave enough room for tables


def _divide(values: Values, most: int) -> Iterator[Values]:
    """Yield parts that have at most `most` elements or can be divided anywhere, in row-major order, as views."""
    if values.size <= most or values.flags.c_contiguous:
        yield values
        return
    rows = most // max(values[0].size, 1)
    for first in range(0, len(values), max(rows, 1)):
        yield from _divide(values[first : first + rows] if rows else values[first], most)


def _tabulate_values(batch: _Batch) -> Integers:
    """Return the spans of the batch's elements: (N, 5), the number of the piece before what `Tables` says."""
    tables = []
    for part, place in zip(batch.parts, batch.places, strict=True):
        offset = np.arange(0, part.size, SPAN)
        table = np.empty((len(offset), 5), dtype=np.int64)
        table[:, 0] = part.piece.number
        table[:, 1] = part.piece.copy.data_ptr() + (part.first + offset) * batch.dtype.itemsize
        table[:, 2] = place + offset if place >= 0 else -1
        table[:, 3] = np.minimum(part.size - offset, SPAN)
        table[:, 4] = part.first + offset
        tables.append(table)
    return np.concatenate(tables)


def _tabulate_words(batch: _Batch) -> Integers:
    """Return the spans of the batch's words of eight bytes, those that end in its parts: (N, 6), likewise."""
    tables = []
    per_word = max(8 // batch.dtype.itemsize, 1)
    for part in batch.parts:
        stop = part.first + part.size
        first, last = part.first // per_word, stop // per_word
        rest = stop - last * per_word if stop == part.piece.copy.numel() else 0
        if first == last and rest == 0:
            continue
        start = part.piece.copy.data_ptr()
        offset = np.arange(first, max(last, first + 1), WORDS)
        table = np.zeros((len(offset), 6), dtype=np.int64)
        table[:, 0] = part.piece.number
        table[:, 1] = start + offset * 8
        table[:, 2] = np.minimum(last - offset, WORDS)
        table[:, 3] = offset
        table[-1, 4] = start + last * 8
        table[-1, 5] = rest
        tables.append(table)
    return np.concatenate(tables) if tables else np.empty((0, 6), dtype=np.int64)


class _Results:
    """What launches left, on its way to the CPU, and the piece to which each row belongs."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._numbers: list[tuple[Integers, Integers]] = []
        self._found: list[Tensor] = []
        self._room = torch.empty(0, dtype=torch.float64)

    def put(self, measured: Integers, hashed: Integers, out: Tensor) -> None:
        if len(self._room) < len(out):  # pinned memory is dear to get, so many launches share it
            self._room = torch.empty(max(len(out), 1 << 18), dtype=torch.float64, pin_memory=self._pinned)
        found, self._room = self._room[: len(out)], self._room[len(out) :]
        found.copy_(out, non_blocking=True)
        self._found.append(found)
        self._numbers.append((measured, hashed))

    def merge(self, count: int) -> tuple[Tensor, Tensor]:
        """Return statistics (count, NUM_STATISTICS) and hashes (count,), when everything has arrived."""
        hashes = torch.zeros(count, dtype=torch.int64)
        if not self._found:
            return torch.zeros((count, NUM_STATISTICS), dtype=torch.float64), hashes
        ends = [NUM_STATISTICS * len(measured) for measured, _ in self._numbers]
        rows = torch.cat([out[:end] for out, end in zip(self._found, ends, strict=True)])
        sums = torch.cat([out[end:] for out, end in zip(self._found, ends, strict=True)]).view(torch.int64)
        measured = torch.from_numpy(np.concatenate([numbers for numbers, _ in self._numbers]))
        hashed = torch.from_numpy(np.concatenate([numbers for _, numbers in self._numbers]))
        return merge_rows(measured, rows.view(-1, NUM_STATISTICS), count), hashes.index_add_(0, hashed, sums)

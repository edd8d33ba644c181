"""Asynchronous comparison: shards are copied on the device and compared on a side stream, so training never blocks.

The path of a shard, and who does each part of it:

1. training thread: copy it on the device, many in one launch, on the stream of the training (`add_all`);
2. collector thread: put clones into batches of one pair of dtypes (`staging.Packing`);
3. reader threads: copy the golden's values of a batch from the mapped file into pinned memory;
4. collector thread: pinned memory to the device, then one launch for the whole batch, on a side stream.

So the golden crosses the bus while the next step computes. Memory is bounded three times: clones by a share of the
training's own peak, batches that are on their way by `_WAYS` slots of pinned memory, results by their size.

Python's threads share the interpreter's lock, so what the side threads do must release it or be short: NumPy copies
without it, and torch's own operations, each of which takes it again, are kept to a few for a batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeverify.compare.difference import NUM_STATISTICS, Measured, Read, merge_rows
from moeverify.compare.gpu.kernels import compare_spans, is_known
from moeverify.compare.gpu.staging import ROOM, TABLES, Batch, Packed, Packing, StagedShard, Values
from moeverify.layout.observer import copy_all

_HANDED, _ENOUGH = (
    64,
    1 << 22,
)  # shards, or elements, that are handed over at once
_READERS = 6  # threads; one alone reads 5 to 10 GB/s from the system's cache of files
_WAYS = 8  # batches that are on their way at a time
# Bytes that copies may take on the GPU before the training has to wait: of what its own peak has been, and at least.
_SHARE, _LEAST = 0.05, 1 << 26


class _Slot:
    """Pinned memory for one batch on its way, as torch and as NumPy see it."""

    def __init__(self, *, pinned: bool) -> None:
        self.memory = torch.empty(ROOM, dtype=torch.uint8, pin_memory=pinned)
        self.array: Values = self.memory.numpy()


@dataclass(frozen=True)
class _Reading:
    batch: Batch
    slot: _Slot
    done: Future[None]


@dataclass(frozen=True)
class _Running:
    batch: Batch  # keeps the copies alive until the device has read them
    slot: _Slot
    done: Any


class AsyncComparison:
    """Compares the shards of one device in the order of `add_all`; `results` waits for all of them.

    Raises: what reading the golden raises, from `results` or a later `add_all`.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._on_gpu = device.type == "cuda"
        index = torch.cuda.current_device() if self._on_gpu and device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._stream = self._module.Stream()
        self._staging = torch.empty(ROOM, dtype=torch.uint8, device=self._device)
        # A row of the tables, 32 bytes or more, leaves a row of results: as many as fit into a batch.
        self._out = torch.empty(NUM_STATISTICS * TABLES // 32, dtype=torch.float64, device=self._device)
        # A new thread's device is the first one, whatever that of its maker is.
        self._collector, self._readers = (
            ThreadPoolExecutor(count, name, self._module.set_device, (self._device,))
            for count, name in ((1, "collect"), (_READERS, "read"))
        )
        # Touched by the training thread alone:
        self._num_shards = 0
        self._gathered: list[StagedShard] = []
        self._num_gathered = 0
        self._jobs: deque[Future[None]] = deque()
        self._limit = _LEAST
        # Touched by both, under the lock:
        self._lock = threading.Lock()
        self._copied = 0  # bytes of copies that are not known to have been compared
        # Touched by the collector's thread alone:
        self._packing = Packing()
        self._slots: list[_Slot] = []
        self._num_slots = 0
        self._reading: deque[_Reading] = deque()
        self._running: deque[_Running] = deque()
        self._views = {torch.uint8: self._staging}
        self._results = _Results(pinned=self._on_gpu)
        self._unknown: set[int] = set()

    def add_all(self, shards: Sequence[tuple[Read, Tensor]]) -> None:
        """Take shards; `read` returns what is expected (of its shape, on the CPU), or None where nothing is.

        Later changes of the tensors do not matter. Waits only where copies would take more memory than they may.
        """
        together: list[tuple[Read, Tensor]] = []
        num_elements = 0
        for read, actual in shards:
            together.append((read, actual))
            num_elements += actual.numel()
            if self._num_gathered + num_elements >= _ENOUGH or len(self._gathered) + len(together) >= _HANDED:
                self._copy(together)
                together, num_elements = [], 0
        if together:
            self._copy(together)

    def _copy(self, shards: Sequence[tuple[Read, Tensor]]) -> None:
        """Copy shards, and give the collector what was gathered where that is enough."""
        known = [actual if is_known(actual.dtype) else actual.to(torch.float64) for _, actual in shards]
        num_bytes = 0
        for (read, _), copy in zip(shards, copy_all(known, contiguous=True), strict=True):
            self._gathered.append(StagedShard(self._num_shards, read, copy))
            self._num_shards += 1
            self._num_gathered += copy.numel()
            num_bytes += copy.nbytes
        with self._lock:
            self._copied += num_bytes
            full = self._copied > self._limit
        if full or self._num_gathered >= _ENOUGH or len(self._gathered) >= _HANDED:
            self._hand_over()
        if full:
            self._wait_for_room()

    def results(self) -> Iterator[Measured]:
        """Yield what came out, in the order of `add_all`."""
        self._hand_over()
        self._collector.submit(self._finish).result()
        for job in self._jobs:
            job.result()
        statistics, hashes = self._results.merge(self._num_shards)
        for number, (row, bits) in enumerate(zip(statistics.tolist(), hashes.tolist(), strict=True)):
            yield Measured(row, bits, number not in self._unknown)

    def _hand_over(self) -> None:
        """Give the collector what was gathered."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        if self._gathered:
            # The side stream must not read a clone before the training's stream has made it.
            ready = self._module.Event()
            ready.record()
            self._jobs.append(self._collector.submit(self._collect, self._gathered, ready))
            self._gathered, self._num_gathered = [], 0

    def _wait_for_room(self) -> None:
        """Let the training wait, once, if its own peak does not allow for more clones either."""
        if self._on_gpu:
            self._limit = max(_LEAST, int(_SHARE * torch.cuda.max_memory_allocated(self._device)))
        with self._lock:
            full = self._copied > self._limit
        if full:
            self._collector.submit(self._finish).result()

    def _collect(self, shards: list[StagedShard], ready: Any) -> None:
        """Put shards into batches, and send off those that are full."""
        for shard in shards:
            expected = shard.read()
            if expected is None:
                self._unknown.add(shard.number)
            elif expected.shape != shard.copy.shape:
                wanted, found = tuple(expected.shape), tuple(shard.copy.shape)
                raise ValueError(f"cannot compare shape {found} with {wanted}")
            for batch in self._packing.put(shard, expected, ready):
                self._send(batch)

    def _send(self, batch: Batch) -> None:
        """Let the readers begin with a batch, and compare those that have been read."""
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
        packed = batch.pack(
            slot.array
        )  # the tables lie behind the values, so this need not wait for the readers
        reading.done.result()
        with self._module.stream(self._stream):
            for ready in batch.ready:
                self._stream.wait_event(ready)
            self._staging[: packed.size].copy_(slot.memory[: packed.size], non_blocking=True)
            if packed.tables.num_results:
                expected = self._view(batch.expected_dtype)
                compare_spans(self._view(torch.int64), packed.tables, expected, batch.dtype, self._out)
                self._results.put(packed, self._out[: packed.tables.num_results])
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
        """Wait for the oldest batch on the device; its clones may then be freed and its slot be used again."""
        running = self._running.popleft()
        running.done.synchronize()
        self._slots.append(running.slot)
        with self._lock:
            self._copied -= running.batch.num_elements * running.batch.dtype.itemsize

    def _finish(self) -> None:
        """Compare all that was collected."""
        for batch in self._packing.rest():
            self._send(batch)
        while self._reading:
            self._compare()
        while self._running:
            self._retire()


class _Results:
    """Rows that launches left, on their way to the CPU, and the shard to which each row belongs."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._packed: list[Packed] = []
        self._found: list[Tensor] = []
        self._room = torch.empty(0, dtype=torch.float64)

    def put(self, packed: Packed, out: Tensor) -> None:
        if len(self._room) < len(out):  # pinned memory is dear to get, so many launches share it
            self._room = torch.empty(max(len(out), 1 << 18), dtype=torch.float64, pin_memory=self._pinned)
        found, self._room = self._room[: len(out)], self._room[len(out) :]
        found.copy_(out, non_blocking=True)
        self._found.append(found)
        self._packed.append(packed)

    def merge(self, count: int) -> tuple[Tensor, Tensor]:
        """Return statistics (count, NUM_STATISTICS) and hashes (count,), when everything has arrived."""
        hashes = torch.zeros(count, dtype=torch.int64)
        if not self._found:
            return torch.zeros((count, NUM_STATISTICS), dtype=torch.float64), hashes
        ends = [NUM_STATISTICS * packed.tables.num_measured for packed in self._packed]
        rows = torch.cat([out[:end] for out, end in zip(self._found, ends, strict=True)])
        sums = torch.cat([out[end:] for out, end in zip(self._found, ends, strict=True)]).view(torch.int64)
        measured = torch.from_numpy(np.concatenate([packed.measured for packed in self._packed]))
        hashed = torch.from_numpy(np.concatenate([packed.hashed for packed in self._packed]))
        return merge_rows(measured, rows.view(-1, NUM_STATISTICS), count), hashes.index_add_(0, hashed, sums)

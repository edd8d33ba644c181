"""Asynchronous comparison: shards are copied on the device and compared on a side stream.

Training waits only if the copies exceed their memory limit. The path of a shard through the threads:

1. training thread: copy it on the device, many shards per launch, on the training stream (`add_all`);
2. collector thread: put the copies into batches with one pair of dtypes (`staging.OpenBatches`);
3. reader threads: copy the golden values of a batch from the mapped file into pinned memory;
4. collector thread: copy pinned memory to the device, then compare the batch in one launch, on a side stream.

The golden thus crosses the bus while the next step computes. Three limits bound the memory: a share of the
training's own peak for copies, `_WAYS` slots of pinned memory for batches in flight, and the size of the
results.

Python's threads share the interpreter lock, so the side threads must release it or be short. NumPy copies
without the lock. Each torch operation acquires it again, so a batch uses only a few.
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

from moeverify.parallel.regions.observer import copy_all
from moeverify.verification.compare.difference import NUM_STATISTICS, Measured, Read, merge_rows
from moeverify.verification.compare.gpu.kernels import compare_spans, is_known
from moeverify.verification.compare.gpu.staging import (
    ROOM,
    TABLES,
    OpenBatches,
    Packed,
    StagedBatch,
    StagedShard,
    Values,
)

_HANDED, _ENOUGH = (
    64,
    1 << 22,
)  # number of shards or elements that are handed over at once
_READERS = 6  # threads; a single one reads 5 to 10 GB/s from the page cache
_WAYS = 8  # batches in flight
# Limit on the GPU memory of copies before the training has to wait: a share of the training's own peak
# memory, and a minimum in bytes.
_SHARE, _LEAST = 0.05, 1 << 26


class _PinnedBatch:
    """Pinned memory for one batch in flight, as a torch tensor and as a NumPy array."""

    def __init__(self, *, pinned: bool) -> None:
        self.memory = torch.empty(ROOM, dtype=torch.uint8, pin_memory=pinned)
        self.array: Values = self.memory.numpy()


@dataclass(frozen=True)
class _Reading:
    batch: StagedBatch
    slot: _PinnedBatch
    done: Future[None]


@dataclass(frozen=True)
class _Running:
    batch: StagedBatch  # keeps the copies alive until the device has read them
    slot: _PinnedBatch
    done: Any


class AsyncComparison:
    """Compares the shards of one device in the order of `add_all`; `results` waits for all of them.

    Raises: ValueError when a shape differs from the golden's, and any error from reading the golden. These
        come from `results` or a later `add_all`.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._on_gpu = device.type == "cuda"
        index = torch.cuda.current_device() if self._on_gpu and device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._stream = self._module.Stream()
        self._staging = torch.empty(ROOM, dtype=torch.uint8, device=self._device)
        # Each row of the tables, of at least 32 bytes, produces one row of results; this is the maximum
        # number in a batch.
        self._out = torch.empty(NUM_STATISTICS * TABLES // 32, dtype=torch.float64, device=self._device)
        # A new thread starts with device 0, whatever the device of its creator is.
        self._collector, self._readers = (
            ThreadPoolExecutor(count, name, self._module.set_device, (self._device,))
            for count, name in ((1, "collect"), (_READERS, "read"))
        )
        # Used only by the training thread:
        self._num_shards = 0
        self._gathered: list[StagedShard] = []
        self._num_gathered = 0
        self._jobs: deque[Future[None]] = deque()
        self._limit = _LEAST
        # Used by both threads, under the lock:
        self._lock = threading.Lock()
        self._copied = 0  # bytes of copies whose comparison may be unfinished
        # Used only by the collector thread:
        self._packing = OpenBatches()
        self._slots: list[_PinnedBatch] = []
        self._num_slots = 0
        self._reading: deque[_Reading] = deque()
        self._running: deque[_Running] = deque()
        self._views = {torch.uint8: self._staging}
        self._results = _Results(pinned=self._on_gpu)
        self._unknown: set[int] = set()

    def add_all(self, shards: Sequence[tuple[Read, Tensor]]) -> None:
        """Add shards; `read` returns the expected values on the CPU, of the same shape, or None.

        Later changes of the tensors have no effect. The call blocks only if the copies exceed their memory
        limit.
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
        """Copy shards, and hand the gathered ones to the collector once there are enough."""
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
        """Yield the results in the order of `add_all`."""
        self._hand_over()
        self._collector.submit(self._finish).result()
        for job in self._jobs:
            job.result()
        statistics, hashes = self._results.merge(self._num_shards)
        for number, (row, bits) in enumerate(zip(statistics.tolist(), hashes.tolist(), strict=True)):
            yield Measured(row, bits, number not in self._unknown)

    def _hand_over(self) -> None:
        """Hand the gathered shards to the collector."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        if self._gathered:
            # The side stream must not read a copy before the training stream has made it.
            ready = self._module.Event()
            ready.record()
            self._jobs.append(self._collector.submit(self._collect, self._gathered, ready))
            self._gathered, self._num_gathered = [], 0

    def _wait_for_room(self) -> None:
        """Block the training until all copies are compared, unless its peak memory now allows more copies."""
        if self._on_gpu:
            self._limit = max(_LEAST, int(_SHARE * torch.cuda.max_memory_allocated(self._device)))
        with self._lock:
            full = self._copied > self._limit
        if full:
            self._collector.submit(self._finish).result()

    def _collect(self, shards: list[StagedShard], ready: Any) -> None:
        """Put shards into batches, and send the full ones."""
        for shard in shards:
            expected = shard.read()
            if expected is None:
                self._unknown.add(shard.number)
            elif expected.shape != shard.copy.shape:
                wanted, found = tuple(expected.shape), tuple(shard.copy.shape)
                raise ValueError(f"cannot compare shape {found} with {wanted}")
            for batch in self._packing.put(shard, expected, ready):
                self._send(batch)

    def _send(self, batch: StagedBatch) -> None:
        """Start the reads of a batch, and compare the batches whose reads are done."""
        while self._running and self._running[0].done.query():
            self._retire()
        while not self._slots and self._num_slots == _WAYS:
            if self._running:
                self._retire()
            else:
                self._compare()
        if not self._slots:
            self._slots.append(_PinnedBatch(pinned=self._on_gpu))
            self._num_slots += 1
        slot = self._slots.pop()
        self._reading.append(_Reading(batch, slot, self._readers.submit(batch.read, slot.array)))
        while self._reading and self._reading[0].done.done():
            self._compare()

    def _compare(self) -> None:
        """Copy the oldest batch to the device and launch its comparison."""
        reading = self._reading.popleft()
        batch, slot = reading.batch, reading.slot
        packed = batch.pack(slot.array)  # the tables follow the values, so this need not wait for the readers
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
        """Return an event on which a thread can wait without busy polling."""
        if self._on_gpu:
            return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return self._module.Event()

    def _view(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._views:
            self._views[dtype] = self._staging.view(dtype)
        return self._views[dtype]

    def _retire(self) -> None:
        """Wait for the oldest batch on the device, then release its copies and its slot."""
        running = self._running.popleft()
        running.done.synchronize()
        self._slots.append(running.slot)
        with self._lock:
            self._copied -= running.batch.num_elements * running.batch.dtype.itemsize

    def _finish(self) -> None:
        """Compare everything that was collected."""
        for batch in self._packing.rest():
            self._send(batch)
        while self._reading:
            self._compare()
        while self._running:
            self._retire()


class _Results:
    """Result rows on their way to the CPU, with the shard of each row."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._packed: list[Packed] = []
        self._found: list[Tensor] = []
        self._room = torch.empty(0, dtype=torch.float64)

    def put(self, packed: Packed, out: Tensor) -> None:
        if len(self._room) < len(out):  # pinned memory is slow to allocate, so many launches share a block
            self._room = torch.empty(max(len(out), 1 << 18), dtype=torch.float64, pin_memory=self._pinned)
        found, self._room = self._room[: len(out)], self._room[len(out) :]
        found.copy_(out, non_blocking=True)
        self._found.append(found)
        self._packed.append(packed)

    def merge(self, count: int) -> tuple[Tensor, Tensor]:
        """Return statistics (count, NUM_STATISTICS) and hashes (count,) after all copies to the CPU."""
        hashes = torch.zeros(count, dtype=torch.int64)
        if not self._found:
            return torch.zeros((count, NUM_STATISTICS), dtype=torch.float64), hashes
        ends = [NUM_STATISTICS * packed.tables.num_measured for packed in self._packed]
        rows = torch.cat([out[:end] for out, end in zip(self._found, ends, strict=True)])
        sums = torch.cat([out[end:] for out, end in zip(self._found, ends, strict=True)]).view(torch.int64)
        measured = torch.from_numpy(np.concatenate([packed.measured for packed in self._packed]))
        hashed = torch.from_numpy(np.concatenate([packed.hashed for packed in self._packed]))
        return merge_rows(measured, rows.view(-1, NUM_STATISTICS), count), hashes.index_add_(0, hashed, sums)

"""Clock of ranks that runs slower while they wait for a processor. Does not import torch.

A limit in its seconds separates slow ranks from stuck ones. A rank that sleeps in a collective, or computes
without end, uses up its limit. A rank that other processes keep from running does not.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from moeverify.results.failure import MachineLoad

_INTERVAL = 0.25
_POLL = 0.02
_SLOWEST = 1 / 64  # no limit lasts more than 64 times as long, even if a rank gets no processor at all
_FRESH = 1.0  # seconds for which a published time is extrapolated
_RECORD = struct.Struct("dd")
_NANO = 1e-9


class Usage(NamedTuple):
    """Processor time of some threads: of the busiest one, and the sum of their waits. Units: seconds."""

    ran: float
    waited: float


class ActiveClock:
    """Clock that starts at 0 and advances only at the rate at which the ranks get processors.

    In an interval, it advances by the wall time minus all waits of the ranks: one rank may have waited for
    another one that waited for a processor. It advances at least by the time that the busiest rank ran.
    `measure` returns the usage since its last call. With a `path`, each new time is also written to that file,
    for `PublishedClock`.
    """

    def __init__(self, measure: Callable[[], Usage], path: Path | None = None) -> None:
        self._measure = measure
        self._began = self._last = time.monotonic()
        self._now = 0.0
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._publish()

    def read(self) -> float:
        """Return the time. It has a resolution of a quarter of a second. Units: seconds."""
        now = time.monotonic()
        passed = now - self._last
        if passed >= _INTERVAL:
            usage = self._measure()
            self._now += min(passed, max(passed - usage.waited, usage.ran, passed * _SLOWEST))
            self._last = now
            self._publish()
        return self._now

    def sleep(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Sleep for a time of this clock, at most until a condition holds. Return whether it holds."""
        end = self.read() + seconds
        while not (holds := until()) and self.read() < end:
            time.sleep(_POLL)
        return holds

    @property
    def not_counted(self) -> float:
        """Return the wall time that this clock did not count so far. Units: seconds."""
        return max(self._last - self._began - self._now, 0.0)

    def describe_machine(self, before: float) -> MachineLoad:
        """Return the load of this machine, and the time not counted since `not_counted` was `before`."""
        return MachineLoad(
            load=os.getloadavg()[0],
            num_processors=len(os.sched_getaffinity(0)),
            not_counted=self.not_counted - before,
        )

    def close(self) -> None:
        """Close the file. The last time remains there."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _publish(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk: the ranks keep the last time
                os.pwrite(self._file, _RECORD.pack(self._last, self._now), 0)


class PublishedClock:
    """The clock of another process of this machine, read from the file that it writes.

    If that process publishes nothing, the time stops after a second.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> float:
        """Return the time. Units: seconds."""
        written, there = _RECORD.unpack(os.pread(self._file, _RECORD.size, 0))
        return float(there) + min(max(time.monotonic() - float(written), 0.0), _FRESH)


class ProcessTree:
    """The processes below a process, or that process itself while it has no children.

    `root` is its id, or None before it has started. Only main threads count: other threads mostly poll, and
    each of their polls waits.
    """

    def __init__(self) -> None:
        self.root: int | None = None
        self._before: dict[int, Usage] = {}

    def list_processes(self) -> list[int]:
        """Return the ids of the processes below the root."""
        return [] if self.root is None else list(_list_below(self.root))

    def measure(self) -> Usage:
        """Return the usage of the processes since the last call."""
        roots = [] if self.root is None else [self.root]
        found = {pid: read_usage(pid) for pid in self.list_processes() or roots}
        grown = [_subtract(usage, self._before.get(pid)) for pid, usage in found.items()]
        self._before = found
        return Usage(max((each.ran for each in grown), default=0.0), sum(each.waited for each in grown))


class ThreadUsage:
    """The usage of one thread of this process."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._before = read_usage(os.getpid(), thread)

    def measure(self) -> Usage:
        """Return the usage of the thread since the last call."""
        before, self._before = self._before, read_usage(os.getpid(), self._thread)
        return _subtract(self._before, before)


def read_usage(pid: int, thread: int | None = None) -> Usage:
    """Return how long a thread, by default the main one, ran, and was ready to run without a processor.

    Zero where the system does not count it (other systems than Linux), and for a process that has ended.
    """
    try:
        text = Path(f"/proc/{pid}/task/{thread or pid}/schedstat").read_text()
        ran, waited, _ = map(int, text.split())
    except (OSError, ValueError):
        return Usage(0.0, 0.0)
    return Usage(ran * _NANO, waited * _NANO)


def _subtract(now: Usage, before: Usage | None) -> Usage:
    if before is None:
        return now
    return Usage(max(now.ran - before.ran, 0.0), max(now.waited - before.waited, 0.0))


def _list_below(pid: int) -> Iterator[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return
    for child in children:
        yield child
        yield from _list_below(child)

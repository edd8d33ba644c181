"""Monitor of an armed process: detects stopped ranks without a collective.

A daemon thread polls the runtime directory five times per second. On several nodes it also counts stops in
the store of torch.distributed, over a separate connection.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from datetime import timedelta
from typing import Any

from multiprocessing_pdb.rank.control import Control
from multiprocessing_pdb.rank.descriptors import RoomForDescriptors
from multiprocessing_pdb.rank.endpoint import write_stderr
from multiprocessing_pdb.rank.identify import identify
from multiprocessing_pdb.rank.in_flight import InFlightCollectives
from multiprocessing_pdb.rank.process_state import PROCESS
from multiprocessing_pdb.rank.stack_file import StackFile
from multiprocessing_pdb.rank.store_count import StoreCount, spans_nodes
from multiprocessing_pdb.wire.identity import FileOwner, RankIdentity
from multiprocessing_pdb.wire.procfs import is_alive
from multiprocessing_pdb.wire.runtime_directory import ARMED_SUFFIX, SOCKET_SUFFIX, RuntimeDirectory

_PERIOD = 0.2


class Monitor(threading.Thread):
    """Thread that raises this process's timeouts while another rank of its job is stopped.

    It also records the collective in flight, whose timeout cannot be raised.
    """

    def __init__(self) -> None:
        super().__init__(name="multiprocessing_pdb monitor", daemon=True)
        self._over = threading.Event()
        self._directory = RuntimeDirectory.open(create=True)
        self._rank = identify(process=True)
        self._control = Control()
        self._in_flight = InFlightCollectives()
        self._store = StoreCount() if spans_nodes() else None
        self._stacks = StackFile(self._directory, self._rank.file_stem())
        self._record: dict[str, Any] = {}
        self._problem = ""

    def run(self) -> None:
        """Poll five times per second until `end`."""
        while not self._over.wait(_PERIOD):
            try:
                self.look()
            except Exception as error:  # the program must not notice, but the user must
                write_stderr(
                    f"the monitor of rank {self._rank.label} has ended: {type(error).__name__}: {error}"
                )
                return

    def look(self) -> None:
        """Poll once, or say once that the directory or the descriptors do not allow it for now."""
        try:
            self._look()
            self._problem = ""
        except OSError as error:
            if self._problem != str(error):
                self._problem = str(error)
                write_stderr(f"rank {self._rank.label} does not see stopped ranks now: {error}")

    def _look(self) -> None:
        self._stacks.restore()
        if self._rank.number is None:
            self._become(identify(process=True))
        stopped = self._is_other_stopped()
        flight = self._in_flight.look(PROCESS.timeouts.shortest(), PROCESS.timeouts.are_raised())
        if stopped:
            PROCESS.timeouts.hold("another rank is stopped")
        else:
            PROCESS.timeouts.release("another rank is stopped")
        if self._store is not None and self._store.is_asked_to_stop() and not PROCESS.has_open():
            self._control.stop("another rank asked all to stop")
        PROCESS.timeouts.extend()  # also raise process groups created since
        self._write_record(flight if stopped and not PROCESS.has_open() else None)

    def _become(self, rank: RankIdentity) -> None:
        """Take the rank that was unknown when the monitor began, before torch.distributed was initialized."""
        if rank != self._rank:
            self._directory.remove(self._rank.file_stem() + ARMED_SUFFIX)
            self._control.close()
            self._rank, self._record, self._control = rank, {}, Control()

    def _is_other_stopped(self) -> bool:
        seen = False
        for name in self._directory.names(SOCKET_SUFFIX):
            owner = FileOwner.parse(name.removesuffix(SOCKET_SUFFIX))
            mine = owner.job == self._rank.job and owner.pid != self._rank.pid
            seen = seen or (mine and is_alive(owner.pid, owner.start))
        if self._store is not None:
            seen = self._store.update(PROCESS.has_open()) or seen
        return seen

    def _write_record(self, flight: dict[str, Any] | None) -> None:
        record = {
            "job": self._rank.job,
            "label": self._rank.label,
            "number": self._rank.number,
            "pid": self._rank.pid,
            "start": self._rank.start,
            "host": self._rank.host,
            "raised": PROCESS.timeouts.are_raised(),
            "in_flight": flight,
            **self._stacks.describe(),
        }
        if record != self._record:
            self._record = record
            self._directory.write_record(self._rank.file_stem() + ARMED_SUFFIX, record)

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self._control.abandon()

    def end(self) -> None:
        """Stop polling, restore the timeouts and remove the files of the monitor."""
        self._over.set()
        if self.is_alive():
            self.join(2.0)
        PROCESS.timeouts.release("another rank is stopped")
        self._stacks.close()
        self._control.close()
        self._directory.remove(self._rank.file_stem() + ARMED_SUFFIX)
        self._directory.close()


class _Armed:
    """The monitor of this process, if it is armed."""

    def __init__(self) -> None:
        self.monitor: Monitor | None = None
        self.is_registered = False

    def end(self, pid: int) -> None:
        """End the monitor, unless this is a forked child of the process that started it."""
        monitor, self.monitor = self.monitor, None
        if monitor is not None and os.getpid() == pid:
            monitor.end()

    def forget(self) -> None:
        """Forget the monitor in a forked child, which does not have its thread."""
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.abandon()


_ARMED = _Armed()


def arm(*, hold: bool = False, limit: timedelta | None = None) -> None:
    """Start monitoring. `hold` raises the timeouts until disarm(). A second call only changes options."""
    from multiprocessing_pdb.rank.compiled_code import is_disabled

    if is_disabled():
        return
    if limit is not None:
        PROCESS.timeouts.limit = limit
    if hold:
        PROCESS.timeouts.hold("arm(hold=True)")
    if _ARMED.monitor is not None:
        return
    try:
        with RoomForDescriptors():
            _ARMED.monitor = Monitor()
    except OSError as error:
        write_stderr(f"not armed: {error}")
        return
    _ARMED.monitor.look()  # write the record before returning
    _ARMED.monitor.start()
    PROCESS.survive_forks()
    if not _ARMED.is_registered:
        _ARMED.is_registered = True
        atexit.register(_ARMED.end, os.getpid())
        os.register_at_fork(after_in_child=_ARMED.forget)


def disarm() -> None:
    """Stop monitoring, and restore the timeouts."""
    _ARMED.end(os.getpid())
    PROCESS.timeouts.release("arm(hold=True)")


def wait_until_raised(seconds: float) -> bool:
    """Wait at most `seconds` for raised timeouts, and return whether a new collective would get one."""
    deadline = time.monotonic() + seconds
    while not PROCESS.timeouts.are_raised() and time.monotonic() < deadline:
        time.sleep(0.01)
    return PROCESS.timeouts.are_raised()

"""The rank's side of a watched script: its last collectives, its end, and its state when the watcher asks.

The script stays as it is. Everything begins with the first collective, when the rank of the process is known.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

import torch.distributed as dist

from moeverify.results.failure import EndKind, RankEnd
from moeverify.results.run import RankReport
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.launch.failure_reporter import FailureReporter
from moeverify.verification.launch.plan import write_atomically
from moeverify.verification.launch.watchdog import Watchdog
from moeverify.verification.launch.watched import END_FOLDER, GUEST_SIGNAL, find_state_folder

_STARTED: list[WatchedRank] = []


def watch_rank(folder: Path) -> None:
    """Record the collectives of this process and of those that it forks, in files below `folder`."""
    if dist.is_available() and not _STARTED:
        _STARTED.append(WatchedRank(folder))


def find_trace() -> CollectiveTrace | None:
    """Return the trace that `watch_rank` started in this process, or None."""
    return _STARTED[0].trace if _STARTED else None


class WatchedRank:
    """The files of this process, once it is a rank. A forked process that becomes a rank has its own."""

    def __init__(self, folder: Path) -> None:
        self.trace = CollectiveTrace()
        self._folder = folder
        self._pid = 0  # of the process whose files are open
        self._rank = 0
        self._num_asked = 0
        self._reporter: FailureReporter
        self.trace.on_group = self._begin
        self.trace.__enter__()
        os.register_at_fork(after_in_child=self._forget)

    def _begin(self) -> None:
        """Open the files before the first collective of this process. An error never reaches the script."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        try:
            self._open()
        except Exception as error:
            sys.stderr.write(f"moeverify watch: hangs are not explained: {type(error).__name__}: {error}\n")

    def _open(self) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        # Files of an earlier process of this rank; torchrun restarts ranks.
        for path in (self._folder / f"rank-{self._rank}.stack", self._find_end()):
            path.unlink(missing_ok=True)
        self._num_asked = 0
        while find_state_folder(self._folder, self._num_asked).exists():
            self._num_asked += 1
        self.trace.keep(self._folder / f"rank-{self._rank}.flight")
        self._reporter = FailureReporter(self._folder, self._rank, self.trace, True, is_guest=True)
        Watchdog(lambda: None, self._tick)
        # Unlike `atexit`, this also runs in a process of `multiprocessing`.
        Finalize(None, self._end, exitpriority=0)

    def _forget(self) -> None:
        """Leave the files to the process that forked this one."""
        if self._pid:
            for number in (signal.SIGTERM, GUEST_SIGNAL):
                with suppress(OSError, ValueError):
                    faulthandler.unregister(number)

    def _tick(self, left: float | None) -> None:
        """Update the state of pending collectives, and report the state of this rank if the watcher asks."""
        # A query of a GPU would break a CUDA graph that another thread captures. The report is worth that risk.
        self.trace.poll("cpu")
        folder = find_state_folder(self._folder, self._num_asked)
        if folder.is_dir():
            self._num_asked += 1
            report = self._reporter.describe_state(RankEnd(how=EndKind.OVER_TIME))
            self._write(folder / f"rank-{self._rank}.json", report)

    def _end(self) -> None:
        """Report the exception that ends this process, or that it ends by itself."""
        if self._pid != os.getpid():
            return
        error = _find_error()
        end = RankEnd(how=EndKind.LEFT)
        report = (
            RankReport.of(self._rank, end, pid=self._pid, collective=self.trace.last())
            if error is None
            else self._reporter.describe_error(error)
        )
        self._write(self._find_end(), report)

    def _find_end(self) -> Path:
        return self._folder / END_FOLDER / f"rank-{self._rank}.json"

    def _write(self, path: Path, report: RankReport) -> None:
        with suppress(OSError):  # the watcher has gone, or the disk is full
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, report.model_dump_json())


def _find_error() -> BaseException | None:
    """Return the exception that ends this process, if any.

    `multiprocessing` runs finalizers while the exception is handled. Its function in torch turns the exception
    into `SystemExit`.
    """
    error: BaseException | None = sys.exc_info()[1] or getattr(sys, "last_value", None)
    while isinstance(error, SystemExit):
        error = error.__context__
    return error

"""Files that a rank writes about itself: identity, stacks on a crash, and report on a failure."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import BinaryIO

from moeverify.results.failure import End, RankEnd
from moeverify.results.run import RankReport
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.launch import watchdog
from moeverify.verification.launch.plan import write_atomically
from moeverify.verification.launch.stack import trim_stack
from moeverify.verification.launch.world import find_node

_BACKUP_DELAY = 3.0

SIGNALS_THREAD = "moeverify-signals"


def leave_traces(folder: Path, rank: int, catch_terminate: bool = True) -> BinaryIO:
    """Write the identity of this rank to a file and open the file for its stack dumps.

    The files are `rank-N.json` and `rank-N.stack` in `folder`. Return the open stack file. The C-level
    fault handler dumps the stacks on a crash, on SIGUSR1, and on SIGTERM if `catch_terminate`. The file
    must stay open for this.
    """
    identity = {"rank": rank, "host": find_node(), "pid": os.getpid()}
    write_atomically(folder / f"rank-{rank}.json", json.dumps(identity))
    file = (folder / f"rank-{rank}.stack").open("ab")
    faulthandler.enable(file)
    # These handlers run in C, even while the main thread is inside a collective.
    if catch_terminate:
        faulthandler.register(signal.SIGTERM, file, chain=True)
    faulthandler.register(signal.SIGUSR1, file)
    return file


class FailureReporter:
    """Failure reports of one rank. Must be created in the thread that runs the jobs.

    In addition to the dumps of `leave_traces`, it dumps the stacks when the rank does not return from a
    job.
    """

    def __init__(self, folder: Path, rank: int, trace: CollectiveTrace, catch_terminate: bool) -> None:
        self._rank = rank
        self._trace = trace
        self._file = leave_traces(folder, rank, catch_terminate)
        self._host = find_node()
        self._jobs_thread = threading.get_ident()

    def arm(self, timeout: float) -> None:
        """Begin a job: truncate the stack file, and dump and exit `timeout` plus 3 seconds from now.

        This covers a rank that holds the interpreter lock. In any other case the watchdog fires first.
        """
        os.ftruncate(self._file.fileno(), 0)
        faulthandler.dump_traceback_later(timeout + _BACKUP_DELAY, exit=True, file=self._file)

    def disarm(self) -> None:
        """End a job: cancel the delayed dump."""
        faulthandler.cancel_dump_traceback_later()

    def ignore_terminate(self) -> None:
        """Ignore SIGTERM from now on. The rank is about to write its report and exit."""
        faulthandler.unregister(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def describe_error(self, error: BaseException) -> RankReport:
        """Return the report of an exception that ended this rank's job, with its full traceback."""
        name = type(error).__name__
        line = f"{name}: {error}".strip().splitlines()[0][:500] if str(error) else name
        stack = trim_stack("".join(traceback.format_exception(error)))
        return self._report(RankEnd(how=End.RAISED, error=line), stack)

    def describe_state(self, end: RankEnd) -> RankReport:
        """Return a report with the stacks of all threads, beginning with the thread that runs the jobs.

        Threads that only serve the launch are left out, since their stacks contain nothing about the job.
        """
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        serving = {ident for ident, name in names.items() if name in (watchdog.THREAD_NAME, SIGNALS_THREAD)}
        if threading.main_thread().ident != self._jobs_thread:
            serving.add(threading.main_thread().ident)
        shown = frames.keys() - serving - {threading.get_ident()}
        parts = [
            f"Thread {names.get(ident, ident)}, most recent call last:\n"
            + "".join(traceback.format_stack(frames[ident]))
            for ident in sorted(shown, key=lambda ident: ident != self._jobs_thread)
        ]
        return self._report(end, trim_stack("\n".join(parts)))

    def _report(self, end: RankEnd, stack: str) -> RankReport:
        return RankReport.of(
            self._rank, end, host=self._host, pid=os.getpid(), stack=stack, collective=self._trace.last()
        )

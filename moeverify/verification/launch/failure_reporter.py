"""Files that a rank writes about itself: identity, stacks on a crash, and report on a failure."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import BinaryIO

from moeverify.errors import cut_text, read_message
from moeverify.results.failure import EndKind, RankEnd
from moeverify.results.run import RankReport
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.launch import watchdog
from moeverify.verification.launch.plan import write_atomically
from moeverify.verification.launch.tracebacks import trim_stack
from moeverify.verification.launch.watched import GUEST_SIGNAL
from moeverify.verification.launch.world import find_node

_BACKUP_DELAY = 3.0
_MOST_STACK = 200_000  # characters
_LATE = 1.0

SIGNALS_THREAD = "moeverify-signals"


def leave_traces(
    folder: Path, rank: int, catch_terminate: bool = True, *, is_guest: bool = False
) -> BinaryIO:
    """Write the identity of this rank to a file and open the file for its stack dumps.

    The files are `rank-N.json` and `rank-N.stack` in `folder`. Return the open stack file. The C-level
    fault handler dumps the stacks on a crash, on SIGUSR1, and on SIGTERM if `catch_terminate`. The file
    must stay open for this. In the process of a user's script, as a guest, handlers of the script remain: the
    dump is on `GUEST_SIGNAL`, and not on SIGUSR1, and there is none on a crash if the script has enabled its own.
    """
    identity = {"rank": rank, "host": find_node(), "pid": os.getpid()}
    write_atomically(folder / f"rank-{rank}.json", json.dumps(identity))
    file = (folder / f"rank-{rank}.stack").open("ab")
    if not (is_guest and faulthandler.is_enabled()):
        faulthandler.enable(file)
    # These handlers run in C, even while the main thread is inside a collective.
    if catch_terminate:
        faulthandler.register(signal.SIGTERM, file, chain=True)
    asked = GUEST_SIGNAL if is_guest else signal.SIGUSR1
    if not is_guest or signal.getsignal(asked) is signal.SIG_DFL:
        faulthandler.register(asked, file)
    return file


class FailureReporter:
    """Failure reports of one rank, whose jobs run in the thread that creates this.

    In addition to the dumps of `leave_traces`, it dumps the stacks when the rank does not return from a
    job. The main thread runs the script of a user in which this is a guest.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        trace: CollectiveTrace,
        catch_terminate: bool,
        *,
        is_guest: bool = False,
    ) -> None:
        self._rank = rank
        self._trace = trace
        self._file = leave_traces(folder, rank, catch_terminate, is_guest=is_guest)
        self._host = find_node()
        self._jobs_thread = threading.main_thread().ident if is_guest else threading.get_ident()
        self._dump_at: float | None = None
        self._lock = threading.Lock()

    def arm(self, timeout: float) -> None:
        """Begin a job: truncate the stack file, and dump and exit `timeout` plus 3 seconds from now.

        This covers a rank that holds the interpreter lock. In any other case the watchdog fires first.
        """
        os.ftruncate(self._file.fileno(), 0)
        with self._lock:
            self._dump_later(timeout)

    def follow(self, left: float) -> None:
        """Delay the dump if the job has more time `left` than before: its clock is slow, or it was extended."""
        with self._lock:
            if self._dump_at is not None and time.monotonic() + left + _BACKUP_DELAY > self._dump_at + _LATE:
                self._dump_later(left)

    def _dump_later(self, left: float) -> None:
        self._dump_at = time.monotonic() + left + _BACKUP_DELAY
        faulthandler.dump_traceback_later(left + _BACKUP_DELAY, exit=True, file=self._file)

    def disarm(self) -> None:
        """End a job: cancel the delayed dump."""
        with self._lock:  # the thread of the watchdog calls `follow`
            self._dump_at = None
            faulthandler.cancel_dump_traceback_later()

    def ignore_terminate(self) -> None:
        """Ignore SIGTERM from now on. The rank is about to write its report and exit."""
        faulthandler.unregister(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def describe_error(self, error: BaseException) -> RankReport:
        """Return the report of an exception that ended this rank's job, with its full traceback."""
        name, message = type(error).__name__, read_message(error)
        line = f"{name}: {message}".strip().splitlines()[0][:500] if message else name
        # Each part is cut: frames stay where an exception in the chain has a message of megabytes.
        parts = map(cut_text, traceback.format_exception(error))
        stack = trim_stack(cut_text("".join(parts), _MOST_STACK))
        return self._report(RankEnd(how=EndKind.RAISED, error=line), stack)

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

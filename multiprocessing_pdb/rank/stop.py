"""Stopping the calling thread: at a line of its own, or after an exception."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

from multiprocessing_pdb.rank.debugger import make_debugger
from multiprocessing_pdb.rank.endpoint import write_stderr
from multiprocessing_pdb.rank.identify import identify
from multiprocessing_pdb.rank.pdb_loader import load_pdb
from multiprocessing_pdb.rank.session import Session, Stop
from multiprocessing_pdb.rank.stacks import serves_debugger
from multiprocessing_pdb.rank.unstopped import UNSTOPPED

_THREAD = threading.local()


class _ThreadEnd:
    """Ends the session of a thread that was being stepped when its function returned.

    Thread locals are dropped as the thread ends, and also in a forked child, which must not touch the files. Where a
    circle of references kept them longer, a garbage collection drops them, in any thread and even in the middle of
    what holds the endpoint's lock: there the server's next tick ends the session instead.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pid = os.getpid()
        self._thread_id = threading.get_native_id()

    def __del__(self) -> None:
        if os.getpid() == self._pid and threading.get_native_id() == self._thread_id:
            sys.settrace(None)  # a step past the thread's end must not stop in what closes the endpoint
            self._session.end()


def is_disabled() -> bool:
    """Return whether MPDB_DISABLE makes every stop a no-op."""
    return os.environ.get("MPDB_DISABLE", "") not in ("", "0")


def owns_terminal() -> bool:
    """Return whether this process is alone and has a terminal: then it gets a prompt there, as with pdb."""
    rank = identify()
    context = sys.modules.get("multiprocessing.process")
    related = context is not None and (context.parent_process() is not None or context.active_children())
    if related or (rank.world or 1) > 1 or ".t" in rank.label:
        return False
    if os.environ.get("MPDB_TERMINAL") == "0" or "PYTEST_XDIST_WORKER" in os.environ:
        return False
    try:
        in_front = os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
        return in_front and sys.stdin.isatty() and sys.stdout.isatty()
    except (OSError, ValueError, AttributeError):  # no stdin, or pytest's or a notebook's
        return False


def _may_stop() -> bool:
    """Return whether the calling thread may stop: not while the interpreter ends or the debugger evaluates."""
    if is_disabled() or sys.is_finalizing() or UNSTOPPED.depth > 0:
        return False
    if serves_debugger(threading.current_thread()):
        return False  # the server's thread would wait for itself, for example in a __del__
    session: Session | None = getattr(_THREAD, "session", None)
    return session is None or session.accepts_stops


def _prepare(stop: Stop) -> Any:
    """Return a debugger behind an open endpoint, or None when no console could reach this thread."""
    session: Session | None = getattr(_THREAD, "session", None)
    if session is None:
        session = _THREAD.session = Session()
        _THREAD.end = _ThreadEnd(session)
    if not session.open(stop):
        return None
    if session.debuggers:
        debugger = make_debugger(session, outer=session.debuggers[-1])
    else:
        session.base = debugger = session.base or make_debugger(session)
    debugger.stop = stop
    return debugger


def _make_terminal_debugger() -> Any:
    # The class is called past pdbpp's metaclass, which hands out old instances inside a set_trace.
    return type.__call__(load_pdb().Pdb, skip=["multiprocessing_pdb*"])


def stop_at(frame: FrameType, stop: Stop, *, now: bool = False) -> None:
    """Stop the calling thread at the next line of `frame`; with `now` where it is."""
    if not _may_stop():
        return
    trace = sys.gettrace()
    sys.settrace(None)  # a step that came here must not stop in what opens the endpoint
    if owns_terminal():
        _make_terminal_debugger().set_trace(frame)
        return
    debugger = _prepare(stop)
    if debugger is None:
        sys.settrace(trace)
    else:
        (debugger.stop_now if now else debugger.start_tracing)(frame)


def stop_after(error: BaseException, stop: Stop) -> None:
    """Stop the calling thread in the frame that raised `error`; it goes on when a console lets it."""
    if not _may_stop():
        return
    trace = sys.gettrace()
    sys.settrace(None)  # a step that came here must not stop in what opens the endpoint
    debugger = _make_terminal_debugger() if owns_terminal() else _prepare(stop)
    if debugger is None:
        sys.settrace(trace)
        return
    try:
        debugger.reset()
        debugger.interaction(None, error if sys.version_info >= (3, 13) else error.__traceback__)
    finally:
        session: Session | None = getattr(debugger, "session", None)
        if session is not None and not session.debuggers:
            session.close("resumed")
        elif session is not None:
            sys.settrace(trace)


def trace_from(frame: FrameType, stop: Stop, place: tuple[str, int, str | None] | None = None) -> None:
    """Stop the calling thread when `frame` comes to its next line, or at a place (file, line, condition).

    For a thread that runs: functions that `frame` is just calling are finished first.
    """
    if not _may_stop():
        return
    trace = sys.gettrace()
    sys.settrace(None)
    debugger = _prepare(stop)
    if debugger is None:
        sys.settrace(trace)
        return
    if place is not None:
        file, line, condition = place
        problem = debugger.set_break(file, line, cond=condition)  # before tracing: it would stop in here
        if problem:
            write_stderr(f"rank {debugger.session.rank.label}: {problem}")
            debugger.session.close("resumed")
            sys.settrace(trace)
            return
    debugger.start_tracing(frame)
    # In a pending call. While another one waits for its end, CPython 3.11 lets no traced function begin.
    sys.settrace(None)
    if place is None:
        debugger.set_next(frame)
    else:
        debugger.set_continue()
    sys.settrace(debugger.trace_dispatch)

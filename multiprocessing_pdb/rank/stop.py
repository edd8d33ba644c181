"""Stops of the calling thread: at one of its lines, or after an exception."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

from multiprocessing_pdb.rank.compiled_code import end_compilation, is_disabled
from multiprocessing_pdb.rank.debugger import make_debugger
from multiprocessing_pdb.rank.descriptors import RoomForDescriptors
from multiprocessing_pdb.rank.endpoint import write_stderr
from multiprocessing_pdb.rank.identify import identify
from multiprocessing_pdb.rank.pdb_loader import load_pdb
from multiprocessing_pdb.rank.session import Session, Stop
from multiprocessing_pdb.rank.stacks import serves_debugger
from multiprocessing_pdb.rank.unstopped import UNSTOPPED

_THREAD = threading.local()


class _ThreadEnd:
    """Ends the session of a thread that ends while it is being stepped.

    Thread locals are dropped when the thread ends, and also in a forked child, which must not touch the
    files. If a reference cycle keeps them alive, a garbage collection drops them in any thread, possibly
    one that holds the endpoint's lock. In that case the server's next tick ends the session instead.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pid = os.getpid()
        self._thread_id = threading.get_native_id()

    def __del__(self) -> None:
        if os.getpid() == self._pid and threading.get_native_id() == self._thread_id:
            # a step past the thread's end must not stop in the code that closes the endpoint
            sys.settrace(None)
            self._session.end()


def owns_terminal() -> bool:
    """Return whether this process runs alone and has a terminal. If so, its prompt is there, as with pdb."""
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
    except (OSError, ValueError, AttributeError):  # no stdin, or the stdin of pytest or a notebook
        return False


def _may_stop() -> bool:
    """Return whether the calling thread may stop: not at interpreter shutdown nor in debugger code."""
    if is_disabled() or sys.is_finalizing() or UNSTOPPED.depth > 0:
        return False
    if serves_debugger(threading.current_thread()):
        return False  # the server's thread would wait for itself, for example in a __del__
    session: Session | None = getattr(_THREAD, "session", None)
    return session is None or session.accepts_stops


def _prepare(stop: Stop) -> Any:
    """Return a debugger with an open endpoint, or None if no console could reach this thread."""
    try:
        with RoomForDescriptors():
            return _open_debugger(stop)
    except Exception as error:  # a debugger must not end a run
        write_stderr(f"no stop, {type(error).__name__}: {error}")
        return None


def _open_debugger(stop: Stop) -> Any:
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
    # Bypass pdbpp's metaclass, which returns old instances inside a function named set_trace.
    return type.__call__(load_pdb().Pdb, skip=["multiprocessing_pdb*"])


def stop_at(frame: FrameType, stop: Stop, *, now: bool = False) -> None:
    """Stop the calling thread at the next line of `frame`, or at the current one with `now`."""
    if not _may_stop():
        return
    end_compilation()
    trace = sys.gettrace()
    sys.settrace(None)  # a step that led here must not stop in the code that opens the endpoint
    if owns_terminal():
        _make_terminal_debugger().set_trace(frame)
        return
    debugger = _prepare(stop)
    if debugger is None:
        sys.settrace(trace)
    else:
        (debugger.stop_now if now else debugger.start_tracing)(frame)


def stop_after(error: BaseException, stop: Stop) -> None:
    """Stop the calling thread in the frame that raised `error`, until a console lets it continue."""
    if not _may_stop():
        return
    end_compilation()
    trace = sys.gettrace()
    sys.settrace(None)  # a step that led here must not stop in the code that opens the endpoint
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
    """Stop the calling thread at the next line of `frame`, or at a place (file, line, condition).

    For a running thread: functions that `frame` is currently calling finish first.
    """
    if not _may_stop():
        return
    end_compilation()
    trace = sys.gettrace()
    sys.settrace(None)
    debugger = _prepare(stop)
    if debugger is None:
        sys.settrace(trace)
        return
    if place is not None:
        file, line, condition = place
        # before tracing, which would stop inside this call
        problem = debugger.set_break(file, line, cond=condition)
        if problem:
            write_stderr(f"rank {debugger.session.rank.label}: {problem}")
            debugger.session.close("resumed")
            sys.settrace(trace)
            return
    debugger.start_tracing(frame)
    # This runs in a pending call. CPython 3.11 starts no traced function while another pending call waits.
    sys.settrace(None)
    if place is None:
        debugger.set_next(frame)
    else:
        debugger.set_continue()
    sys.settrace(debugger.trace_dispatch)

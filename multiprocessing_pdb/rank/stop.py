"""Stopping the calling thread: at a line of its own, or after an exception."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from multiprocessing_pdb.rank.debugger import load_pdb, make_debugger
from multiprocessing_pdb.rank.endpoint import write_stderr
from multiprocessing_pdb.rank.identify import identify
from multiprocessing_pdb.rank.session import Session

# A thread keeps its debugger: a second stop must not take the first one's breakpoints and displays away.
_THREAD = threading.local()


@dataclass(frozen=True)
class Stop:
    """Why a thread stops, and how it may be reached."""

    why: str
    tcp: str | None = None
    coordinates: Mapping[str, int] | None = None


def is_disabled() -> bool:
    """Tell whether MPDB_DISABLE makes every stop a no-op."""
    return os.environ.get("MPDB_DISABLE", "") not in ("", "0")


def owns_terminal() -> bool:
    """Tell whether this process is alone and has a terminal: then it gets a prompt there, as with pdb."""
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


def _open_endpoint(stop: Stop) -> Any:
    """Return this thread's debugger behind an open endpoint, or None when none can be opened safely.

    Then the program goes on: a debugger must not end a run.
    """
    session = getattr(_THREAD, "session", None)
    if session is None:
        session = _THREAD.session = Session()
        _THREAD.debugger = make_debugger(session)
    try:
        session.open(stop.why, stop.tcp, dict(stop.coordinates) if stop.coordinates is not None else None)
    except (OSError, ValueError) as error:
        write_stderr(f"rank {session.rank.label} does not stop: {error}")
        return None
    return _THREAD.debugger


def stop_at(frame: FrameType, stop: Stop) -> None:
    """Stop the calling thread at the next line of `frame`."""
    if is_disabled():
        return
    # The class is called past pdbpp's metaclass, which hands out old instances inside a set_trace.
    debugger = type.__call__(load_pdb().Pdb) if owns_terminal() else _open_endpoint(stop)
    if debugger is not None:
        debugger.set_trace(frame)


def stop_after(error: BaseException, stop: Stop) -> None:
    """Stop the calling thread in the frame that raised `error`; it goes on when a console lets it."""
    if is_disabled():
        return
    if owns_terminal():
        debugger = type.__call__(load_pdb().Pdb)
        debugger.reset()
        debugger.interaction(None, error if sys.version_info >= (3, 13) else error.__traceback__)
        return
    debugger = _open_endpoint(stop)
    if debugger is not None:
        try:
            debugger.reset()
            debugger.interaction(None, error if sys.version_info >= (3, 13) else error.__traceback__)
        finally:
            debugger.session.close("resumed")

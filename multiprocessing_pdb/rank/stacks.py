"""The Python stacks of this process's own threads, for `stacks`; any thread that gets the interpreter may ask."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from multiprocessing_pdb.rank.pdb_loader import is_own_module

_MOST_FRAMES = 200


def serves_debugger(thread: threading.Thread) -> bool:
    """Return whether a thread is one of the debugger's own: it must not stop, and is not shown."""
    return thread.name.startswith("multiprocessing_pdb")


def format_stacks() -> str:
    """Return the stack of each thread, innermost call first, in py-spy's form without numbers of threads."""
    known = {thread.ident: thread for thread in threading.enumerate()}
    blocks = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: _order(known.get(item[0]))):
        thread = known.get(ident)
        if thread is None or not serves_debugger(thread):
            name = f' "{thread.name}"' if thread is not None else ""
            blocks.append("\n".join([f"Thread{name}", *_list_calls(frame)]))
    return "\n".join(blocks)


def _order(thread: threading.Thread | None) -> tuple[bool, str]:
    return thread is not threading.main_thread(), thread.name if thread is not None else ""


def _list_calls(frame: FrameType | None) -> list[str]:
    calls: list[str] = []
    while frame is not None and len(calls) < _MOST_FRAMES:
        if is_own_module(frame.f_globals.get("__name__")):  # the prompt that a stopped thread waits at
            frame = frame.f_back
            continue
        calls.append(f"    {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return calls

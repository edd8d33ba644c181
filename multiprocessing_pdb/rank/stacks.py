"""Python stacks of this process's threads, for `stacks`.

Callable from any thread that gets the interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import re
import threading

from multiprocessing_pdb.rank.pdb_loader import is_own_file
from multiprocessing_pdb.wire.own_descriptors import move_above_standard_streams

_THREAD = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+)")
_CALL = re.compile(r' {2}File "(.*)", line (\d+) in (.*)')


def serves_debugger(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to the debugger. Such threads never stop and are not shown."""
    return thread.name.startswith("multiprocessing_pdb")


def format_stacks() -> str:
    """Return the stack of each thread, innermost call first, in py-spy's format without thread ids.

    faulthandler walks the frames at once, with the interpreter lock held. A walk in Python over the frames
    of running threads reads freed memory in CPython 3.11.
    """
    known = {thread.ident: thread for thread in threading.enumerate()}
    shown = [
        (known.get(ident), calls)
        for ident, calls in _dump_calls()
        if ident not in known or not serves_debugger(known[ident])
    ]
    return "\n".join(
        _format_thread(thread, calls) for thread, calls in sorted(shown, key=lambda it: _order(it[0]))
    )


def _order(thread: threading.Thread | None) -> tuple[bool, str]:
    return thread is not threading.main_thread(), thread.name if thread is not None else ""


def _format_thread(thread: threading.Thread | None, calls: list[str]) -> str:
    name = f' "{thread.name}"' if thread is not None else ""
    return "\n".join([f"Thread{name}", *calls])


def _dump_calls() -> list[tuple[int, list[str]]]:
    """Return the id and calls of each thread, without calls in the debugger."""
    descriptor = move_above_standard_streams(os.memfd_create("multiprocessing_pdb"))
    with os.fdopen(descriptor, "w+b") as file:  # faulthandler writes to a descriptor
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().decode("ascii", "backslashreplace").splitlines()
    threads: list[tuple[int, list[str]]] = []
    for line in lines:
        if begin := _THREAD.match(line):
            threads.append((int(begin[1], 16), []))
        elif (call := _CALL.match(line)) and threads and not is_own_file(call[1]):
            threads[-1][1].append(f"    {call[3]} ({call[1]}:{call[2]})")
    return threads

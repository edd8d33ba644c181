"""The Python stacks of this process's own threads, for `stacks`; any thread that gets the interpreter may ask."""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading

from multiprocessing_pdb.rank.descriptors import above_standard_streams
from multiprocessing_pdb.rank.pdb_loader import is_own_file

_THREAD = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+)")
_CALL = re.compile(r' {2}File "(.*)", line (\d+) in (.*)')


def serves_debugger(thread: threading.Thread) -> bool:
    """Return whether a thread is one of the debugger's own: it must not stop, and is not shown."""
    return thread.name.startswith("multiprocessing_pdb")


def format_stacks() -> str:
    """Return the stack of each thread, innermost call first, in py-spy's form without numbers of threads.

    faulthandler walks the frames in one go, with the interpreter's lock held. A walk in Python over frames of threads
    that run meanwhile reads freed memory in CPython 3.11.
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
    """Return the ident of each thread and its calls; those of the debugger itself are left out."""
    with above_standard_streams():
        file = tempfile.TemporaryFile()  # noqa: SIM115  # closed below; a descriptor is what faulthandler writes to
    with file:
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

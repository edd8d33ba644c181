"""Where a thread runs the debugger's own code and must not stop, whatever calls Tra() there.

A garbage collection runs destructors, a signal its handler, and a console's request a pending call between any two
bytecodes; a step traces every function that is called. A stop under a lock of the debugger is one that no console
reaches: the server, or another thread on its way to a prompt, waits for that lock.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any


class Unstopped(threading.local):
    """A context manager in which the calling thread neither stops nor is traced; blocks may be nested."""

    def __init__(self) -> None:
        self.depth = 0  # of blocks that this thread is in
        self._trace: Any = None

    def __enter__(self) -> None:
        if self.depth == 0:
            self._trace = sys.gettrace()
            sys.settrace(None)
        # Last: an exception of a signal handler before this leaves the count right.
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.depth -= 1
        if self.depth == 0 and self._trace is not None:
            trace, self._trace = self._trace, None
            sys.settrace(trace)

    def restore(self, depth: int) -> None:
        """Be as deep as before a call that an exception has ended, perhaps on the way into a block or out of it."""
        self.depth = depth


UNSTOPPED = Unstopped()

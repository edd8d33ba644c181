"""Sections of debugger code in which a thread must not stop, even if the code calls Tra().

Between any two bytecodes a garbage collection can run destructors, a signal its handler, and a console
request a pending call. A step traces every function that is called. A rank that stops while it holds a lock
of the debugger is unreachable: the server, or another thread on its way to a prompt, waits for that lock.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any


class Unstopped(threading.local):
    """Context manager in which the calling thread neither stops nor is traced. Blocks may be nested."""

    def __init__(self) -> None:
        self.depth = 0  # number of enclosing blocks of this thread
        self._trace: Any = None

    def __enter__(self) -> None:
        if self.depth == 0:
            self._trace = sys.gettrace()
            sys.settrace(None)
        # Last, so that an exception of a signal handler before this leaves the count correct.
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.depth -= 1
        if self.depth == 0 and self._trace is not None:
            trace, self._trace = self._trace, None
            sys.settrace(trace)

    def leave_in_child(self) -> None:
        """Leave a block in a child that was forked inside it, and do not trace the child."""
        self.depth -= 1
        self._trace = None

    def restore(self, depth: int) -> None:
        """Restore the depth from before a call that an exception ended, possibly inside an enter or exit."""
        self.depth = depth


UNSTOPPED = Unstopped()

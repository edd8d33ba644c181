"""What this process has open for the debugger, and how it lets go of it: at exit, and in a forked child."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

from multiprocessing_pdb.timeouts import Timeouts


class Open(Protocol):
    """Something with a door."""

    def close(self, end: str) -> None:
        """Answer who waits, and close the door."""

    def abandon(self) -> None:
        """Close descriptors only: this is a forked child, and files and peers are the parent's."""


class Process:
    """The open sessions of this process and the timeouts of its collectives."""

    def __init__(self) -> None:
        self.timeouts = Timeouts()
        self._open: list[Open] = []
        self._registered = False

    def add(self, opened: Open) -> None:
        """Close `opened` when the process exits, and abandon it in forked children."""
        self._open.append(opened)
        if not self._registered:
            self._registered = True
            atexit.register(self._close_all, os.getpid())
            os.register_at_fork(after_in_child=self._abandon_all)

    def remove(self, opened: Open) -> None:
        """Forget what was closed."""
        if opened in self._open:
            self._open.remove(opened)

    def has_open(self) -> bool:
        """Tell whether a thread of this process is stopped or being stepped."""
        return bool(self._open)

    def _close_all(self, pid: int) -> None:
        if os.getpid() == pid:
            for opened in list(self._open):
                opened.close("exited")

    def _abandon_all(self) -> None:
        if not self._open:
            return
        sys.settrace(None)  # a child forked while its parent is stepped is not itself stepped
        for opened in self._open:
            opened.abandon()
        self._open.clear()
        self.timeouts = Timeouts()


PROCESS = Process()

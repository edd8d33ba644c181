"""Open debugger sessions of this process, and their cleanup at exit and in forked children."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

from multiprocessing_pdb.rank.timeouts import Timeouts
from multiprocessing_pdb.rank.unstopped import UNSTOPPED


class Closable(Protocol):
    """An object with an endpoint that consoles are connected to."""

    def close(self, end: str) -> None:
        """Answer pending requests, and close the endpoint."""

    def abandon(self) -> None:
        """Close only the descriptors: in a forked child, files and peers belong to the parent."""


class ProcessState:
    """The open sessions of this process and the timeouts of its collectives."""

    def __init__(self) -> None:
        self.timeouts = Timeouts()
        self._pid = 0  # of the process to which the sessions belong
        self._open: list[Closable] = []
        self._exit_pid = 0  # pid of the process whose exit closes the endpoints, as opposed to a parent
        self._knows_forks = False

    def add(self, opened: Closable) -> None:
        """Close `opened` when the process exits, and abandon it in forked children."""
        self.survive_forks()
        self._open.append(opened)
        if self._exit_pid != self._pid:
            self._exit_pid = self._pid
            atexit.register(self._close_all, self._exit_pid)

    def survive_forks(self) -> None:
        """Make forked children abandon the sessions of their parent, from now on.

        A step would stop in the functions that Python calls before and after a fork, and a child that stops
        there hangs: `threading` still believes in the threads of the parent.
        """
        if not self._knows_forks:
            self._knows_forks = True
            self._pid = os.getpid()
            os.register_at_fork(
                before=UNSTOPPED.__enter__,
                after_in_parent=lambda: UNSTOPPED.__exit__(None, None, None),
                after_in_child=self._begin_child,
            )

    def remove(self, opened: Closable) -> None:
        """Remove an object that was closed."""
        if opened in self._open:
            self._open.remove(opened)

    def has_open(self) -> bool:
        """Return whether a thread of this process is stopped or being stepped."""
        return bool(self._open)

    def _close_all(self, pid: int) -> None:
        if os.getpid() == pid:
            # a step past the program's end must not stop in the code that closes the endpoint
            sys.settrace(None)
            for opened in list(self._open):
                opened.close("exited")

    def _begin_child(self) -> None:
        sys.settrace(None)  # a child forked while its parent is stepped is not stepped itself
        UNSTOPPED.leave_in_child()
        self.notice_fork()

    def notice_fork(self) -> None:
        """Abandon the sessions of the parent in a forked child, also in one that C code has forked."""
        if self._pid in (0, os.getpid()):
            return
        self._pid = os.getpid()
        self.timeouts = Timeouts()  # another thread may have held the lock of the old one
        for opened in self._open:
            opened.abandon()
        self._open.clear()


PROCESS = ProcessState()

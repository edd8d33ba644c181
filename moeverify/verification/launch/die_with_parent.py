"""Processes that do not outlive their launch: each dies with its parent, and orphans are adopted and ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

from moeverify.verification.launch.clock import ProcessTree

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE = 1.0
_POLL = 0.02


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the process `parent` ends; exit now if it has ended.

    Linux only. On other systems an orphan runs until its store or pipe breaks.

    Raises: OSError when `prctl` fails.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    # If the parent ended before the request, the kernel never sends the signal.
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends. Linux only.

    Raises: OSError when `prctl` fails.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """End all processes below this one, by SIGTERM, and by SIGKILL those that do not end. Reaps the children."""
    tree = ProcessTree()
    tree.root = os.getpid()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in tree.list_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + _GRACE
        while _reap() and tree.list_processes() and time.monotonic() < end:
            time.sleep(_POLL)


def _reap() -> bool:
    """Reap the children that have ended. Return whether others are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

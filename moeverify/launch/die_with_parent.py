"""Processes that die with their parent, however it dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Let the kernel kill this process as soon as the process `parent` ends; exit now if it has ended.

    Linux only: elsewhere an orphan lives until its store or its pipe breaks.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    # The parent may have ended before the request: then it will never be honoured.
    if os.getppid() != parent:
        os._exit(1)

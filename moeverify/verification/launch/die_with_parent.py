"""Processes that are killed when their parent process ends for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the process `parent` ends; exit now if it has ended.

    Linux only. On other systems an orphan runs until its store or pipe breaks.

    Raises: OSError when `prctl` fails.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    # If the parent ended before the request, the kernel never sends the signal.
    if os.getppid() != parent:
        os._exit(1)

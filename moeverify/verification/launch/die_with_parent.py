"""Processes that are killed when their parent process ends for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the process `parent` ends; exit now if it has ended.

    Linux only. On other systems an orphan runs until its store or pipe breaks.

    Raises: OSError when `prctl` fails.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    # If the parent ended before the request, the kernel never sends the signal.
    if os.getppid() != parent:
        os._exit(1)

"""The exit status of a process that is not our child: the signal, or the exit code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from pathlib import Path

# From linux/pidfd.h, since Linux 6.15: PIDFD_GET_INFO with PIDFD_INFO_EXIT, for a reaped process.
_GET_INFO = 0xC040FF0B
_INFO_EXIT = 1 << 3
_INFO_SIZE = 64
_EXIT_CODE_AT = 60


class ProcessExit:
    """A handle on a process, opened while it runs, that later returns its exit status."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.pidfd_open(pid)

    def read_status(self) -> int | None:
        """Return the wait status (as of os.waitpid), or None if unknown.

        Any Linux reports it until the parent has reaped the process; after that, Linux 6.15 or later is
        required.
        """
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z":
                return int(fields[-1])
        info = bytearray(_INFO_SIZE)
        struct.pack_into("Q", info, 0, _INFO_EXIT)
        with contextlib.suppress(OSError, ValueError):  # an older kernel, or no descriptor
            fcntl.ioctl(self._descriptor, _GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & _INFO_EXIT:
                return int(struct.unpack_from("i", info, _EXIT_CODE_AT)[0])
        return None

    def close(self) -> None:
        """Close the handle."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def describe_status(status: int) -> str:
    """Return "died by SIGKILL" or "ended with exit code 3"; empty for a success."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"died by {signal.Signals(number).name}"
        return f"died by signal {number}"
    code = os.waitstatus_to_exitcode(status)
    return f"ended with exit code {code}" if code else ""

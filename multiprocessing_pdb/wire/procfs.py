"""Facts about processes and threads from /proc: environment, ancestors, and whether they are alive."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def _read_status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def read_start(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if there is no such process.

    Pids are reused, but the pair of pid and start time is unique.
    """
    status = _read_status(pid)
    return int(status[19]) if len(status) > 19 else 0


def read_parent(pid: int) -> int:
    """Return the pid of a process's parent; 0 if there is none."""
    status = _read_status(pid)
    return int(status[1]) if len(status) > 1 else 0


def is_alive(pid: int, start: int) -> bool:
    """Return whether the process is running; a zombie is not."""
    status = _read_status(pid)
    return len(status) > 19 and status[0] not in "ZX" and int(status[19]) == start


def is_thread_alive(native_id: int) -> bool:
    """Return whether a thread of this process is running; True if there is no /proc."""
    tasks = Path("/proc/self/task")
    return (tasks / str(native_id)).exists() or not tasks.exists()


def send_signal(pid: int, start: int, number: int) -> bool:
    """Send a signal to the process with this start time only; return whether it existed."""
    try:
        descriptor = os.pidfd_open(pid)  # from here on, the pid cannot be reused
    except OSError:
        return False
    try:
        if read_start(pid) != start:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def read_command(pid: int) -> str:
    """Return the command line of a process as one text; empty if it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()


def read_environ(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty if it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def find_ancestors() -> set[int]:
    """Return the pids of this process and its ancestors, which must not be killed together with a job."""
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        pid = read_parent(pid)
    return found

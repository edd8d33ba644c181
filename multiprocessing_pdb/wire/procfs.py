"""Facts from /proc about processes and threads: environment, ancestry, and whether one is still what it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def _read_status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def read_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 when there is none.

    A pid is used again for other processes. Pid and start together never are.
    """
    status = _read_status(pid)
    return int(status[19]) if len(status) > 19 else 0


def read_parent(pid: int) -> int:
    """Return the pid of a process's parent; 0 when there is none."""
    status = _read_status(pid)
    return int(status[1]) if len(status) > 1 else 0


def is_alive(pid: int, start: int) -> bool:
    """Return whether the process runs; one that has ended and was not waited for by its parent does not."""
    status = _read_status(pid)
    return len(status) > 19 and status[0] not in "ZX" and int(status[19]) == start


def is_thread_alive(native_id: int) -> bool:
    """Return whether a thread of this process runs; True where there is no /proc to say so."""
    tasks = Path("/proc/self/task")
    return (tasks / str(native_id)).exists() or not tasks.exists()


def send_signal(pid: int, start: int, number: int) -> bool:
    """Send a signal to the process that started then, and to no other; return whether it was there."""
    try:
        descriptor = os.pidfd_open(pid)  # from here on the pid cannot become another process's
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


def read_environ(pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty where it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def find_ancestors() -> set[int]:
    """Return the pids this process descends from: a job is never killed together with who asked for it."""
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        pid = read_parent(pid)
    return found

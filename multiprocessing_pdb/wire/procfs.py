"""Facts about processes from /proc: environment, ancestry, and whether one is still alive."""

from __future__ import annotations

import os
from pathlib import Path


def _read_status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Tell whether the process runs; one that has ended and was not waited for by its parent does not."""
    return _read_status(pid)[:1] not in ([], ["Z"], ["X"])


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
        status = _read_status(pid)
        pid = int(status[1]) if len(status) > 1 else 0
    return found

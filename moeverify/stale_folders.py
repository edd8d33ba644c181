"""Removal of folders left by killed processes; a file lock marks the folders in use."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "locked"
_NOT_YET = "unlocked"
_OLD = 86400.0  # seconds


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a lock in the folder while the context is open.

    The kernel releases the lock when this process ends in any way.
    """
    with (folder / _NOT_YET).open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Rename only after locking, so that nobody sees the file without its lock.
            (folder / _NOT_YET).rename(folder / LOCK)
        yield


def release(folder: Path) -> None:
    """Remove the lock from a folder that is to be kept."""
    for name in (LOCK, _NOT_YET):
        (folder / name).unlink(missing_ok=True)


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove this user's folders whose process has ended."""
    for folder in folders:
        with suppress(OSError):  # owned by another user, already removed, or locked
            if folder.lstat().st_uid != os.getuid():
                continue
            if not (folder / LOCK).exists():
                # The process was killed before it held its lock, or the file system has no locks. After
                # this long without a write, it is abandoned.
                if time.time() - folder.stat().st_mtime > _OLD:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            with (folder / LOCK).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)

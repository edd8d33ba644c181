"""Folders of a process that was killed are removed by the next one; a lock says which are still in use."""

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
    """Lock a file in the folder; the kernel takes the lock back when this process ends, however it ends."""
    with (folder / _NOT_YET).open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Under its name only now: nobody sees the file without its lock.
            (folder / _NOT_YET).rename(folder / LOCK)
        yield


def release(folder: Path) -> None:
    """Remove the lock from a folder that is to stay."""
    for name in (LOCK, _NOT_YET):
        (folder / name).unlink(missing_ok=True)


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove the folders of this user whose process is no more."""
    for folder in folders:
        with suppress(OSError):  # another user's, or gone by now, or locked
            if folder.lstat().st_uid != os.getuid():
                continue
            if not (folder / LOCK).exists():
                # Killed before it had its lock, or on a file system without: nobody writes for so long.
                if time.time() - folder.stat().st_mtime > _OLD:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            with (folder / LOCK).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)

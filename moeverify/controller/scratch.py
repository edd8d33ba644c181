"""Temporary folders of one command; those of a command that was killed are removed by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "moeverify-"
_LOCKED = "locked"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give a new folder that is gone afterwards."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, _hold(Path(name)):
        yield Path(name)


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Lock a file in the folder; the kernel takes the lock back when this process ends, however it ends."""
    with (folder / "unlocked").open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Under its name only now: nobody sees the file without its lock.
            (folder / "unlocked").rename(folder / _LOCKED)
        yield


def _remove_abandoned(place: Path) -> None:
    """Remove the folders of this user whose process is no more."""
    for lock in place.glob(f"{_PREFIX}*/{_LOCKED}"):
        with suppress(OSError):  # another user's, or gone by now, or locked
            if lock.stat().st_uid != os.getuid():
                continue
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)

"""Atomic creation of a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeverify.errors import CaseError, MachineError, Problem


@contextmanager
def make_folder(destination: Path) -> Iterator[Path]:
    """Yield a new temporary folder next to `destination`, and rename it to `destination` on success.

    After an error or an interrupt the temporary folder is removed. A killed process leaves a folder
    `.NAME.partial-PID`, which may be deleted.

    Raises: CaseError when `destination` is a file or a non-empty folder; MachineError when writing fails.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        remedy = "choose another destination, or remove it"
        raise CaseError([Problem("something is there already", file=str(destination), remedy=remedy)])
    partial = destination.absolute().with_name(f".{destination.absolute().name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        _sync(partial)
        partial.rename(destination.absolute())
        _sync(destination.absolute().parent)
    except OSError as error:
        raise MachineError(f"{destination} was not written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_room(destination: Path, num_bytes: int) -> None:
    """Check that the disk has room for `num_bytes`.

    Raises: MachineError when it does not.
    """
    parent = destination.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        gigabytes = f"{num_bytes / 1e9:.1f} GB are needed there, and {free / 1e9:.1f} GB are free"
        raise MachineError(f"{destination} was not written: {gigabytes}")


def _sync(folder: Path) -> None:
    """Sync a folder's entries and the contents of its JSON files to disk."""
    for path in [*folder.glob("*.json"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

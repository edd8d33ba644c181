"""A folder that is whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeverify.errors import CaseError, MachineError, Problem


@contextmanager
def make_folder(destination: Path) -> Iterator[Path]:
    """Give a new folder beside `destination` to write to, and rename it to that when all went well.

    After an error, also an interrupt, nothing of it is left. A process that is killed leaves a folder whose name
    begins with a dot and ends in `.partial-` and a number, which may be deleted.

    Raises: CaseError where something is at `destination`; MachineError where the disk does not take it.
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
    """Make sure that the disk has room for so many bytes.

    Raises: MachineError.
    """
    parent = destination.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        gigabytes = f"{num_bytes / 1e9:.1f} GB are needed there, and {free / 1e9:.1f} GB are free"
        raise MachineError(f"{destination} was not written: {gigabytes}")


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a loss of power, as well as what the small files in it hold."""
    for path in [*folder.glob("*.json"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

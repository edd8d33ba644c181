"""Reading of files named by a user: regular files only, with a limit on their size."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 1 << 28
"""Maximum size in bytes; results of runs with thousands of cases are a tenth of it."""

LONGEST_NAME = 255  # bytes, on all usual file systems

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_input(path: Path) -> BinaryIO:
    """Return a regular file, opened for reading.

    Raises: OSError, also if the path is a folder, a pipe, a socket or a device.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:
        raise OSError(errno.EINVAL, "its name has a null byte", str(path)) from None
    kind = stat.S_IFMT(os.fstat(number).st_mode)
    if kind == stat.S_IFREG:
        return os.fdopen(number, "rb")
    os.close(number)
    raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'something else')}, and no regular file", str(path))


def read_input(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises: OSError, also if it is not a regular file or is larger than `most`.
    """
    with open_input(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 10} KiB", str(path))
    return content


def is_file_name(name: str) -> bool:
    """Return whether a text names a file in the same folder, and nothing outside of it."""
    return Path(name).name == name and "\0" not in name and len(os.fsencode(name)) <= LONGEST_NAME


def read_sources(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the Python files below a folder, sorted, with their contents.

    Unreadable entries are skipped: dangling links (some editors use them as locks), pipes, folders.
    """
    for path in sorted(folder.rglob("*.py")):
        try:
            content = read_input(path)
        except OSError:
            continue
        yield path, content

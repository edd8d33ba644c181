"""Reading of files named by a user: regular files only, with a limit on their size."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_BYTES = 1 << 28
"""Maximum size in bytes; results of runs with thousands of cases are a tenth of it."""

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
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises: json.JSONDecodeError, also for excessive nesting and for numbers with thousands of digits;
    UnicodeDecodeError.
    """
    doc = text if isinstance(text, str) else text.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", doc, 0) from None
    except ValueError:
        raise json.JSONDecodeError("a number has too many digits", doc, 0) from None


def read_problem(error: ValidationError) -> tuple[str, str]:
    """Return the dotted path of the first invalid field of a file, and the validation message."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), first["msg"]

"""Standard streams that are closed, full, or read by nobody: what they do to the exit code of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from moeverify.cli.context import FAILED, READER_GONE


@contextmanager
def standard_streams() -> Iterator[None]:
    """Run a command line whose standard streams may be closed, or full, without an exit code that says a verdict.

    Raises: SystemExit.
    """
    _open_standard_streams()
    stdout = sys.stdout
    code: Any = 0
    try:
        yield
    except SystemExit as end:
        # Click ends with 1 where the reader of --help or --version is gone, and leaves a stream of its own.
        code = end.code if sys.stdout is stdout else READER_GONE
    except OSError:  # of a stream that takes not even the words on why it does not
        code = FAILED
    is_written = _can_write(stdout) & _can_write(sys.stderr)  # both, whatever the first one says
    raise SystemExit(code or (0 if is_written else FAILED))


def _open_standard_streams() -> None:
    """Open the null device in place of standard streams that are closed (`>&-`).

    Python has no stream then, and the next file that is opened would take the number and whatever is printed.
    """
    for number, mode in enumerate(("r", "w", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            assert opened == number  # the lowest free one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _can_write(stream: TextIO) -> bool:
    """Return whether a stream takes what is waiting in it; one that does not is put out of the way.

    Python flushes its streams once more at the end, and would make an exit code of its own of a failure.
    """
    try:
        stream.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True

"""Handling of standard streams that are closed, full or unread, and their effect on the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from moeverify.cli.context import FAILED, READER_GONE


@contextmanager
def standard_streams() -> Iterator[None]:
    """Run a command line such that broken standard streams never produce the exit code of a verdict.

    Raises: SystemExit.
    """
    _open_standard_streams()
    stdout = sys.stdout
    code: Any = 0
    try:
        yield
    except SystemExit as end:
        # Click exits with code 1 and replaces stdout if the reader of --help or --version is gone.
        code = end.code if sys.stdout is stdout else READER_GONE
    except OSError:  # from a stream to which not even the error message can be written
        code = FAILED
    is_written = _can_write(stdout) & _can_write(sys.stderr)  # flush both, whatever the first returns
    raise SystemExit(code or (0 if is_written else FAILED))


def _open_standard_streams() -> None:
    """Open the null device in place of closed standard streams (`>&-`).

    Otherwise the next opened file would get the descriptor, and everything that is printed.
    """
    for number, mode in enumerate(("r", "w", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            assert opened == number  # the lowest free descriptor
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _can_write(stream: TextIO) -> bool:
    """Flush a stream and return whether that worked; on failure redirect it to the null device.

    Python flushes its streams again at exit, and would change the exit code after a failure.
    """
    try:
        stream.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True

"""Descriptors that stay the debugger's own: a program may close them, and open other files with their numbers."""

from __future__ import annotations

import fcntl
import os

Identity = tuple[int, int]


def find_identity(descriptor: int) -> Identity | None:
    """Return device and inode of an open descriptor, or None if it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def move_above_standard_streams(descriptor: int) -> int:
    """Return the descriptor, moved above 2 if it is one of stdin, stdout and stderr, which the program has closed.

    Raises OSError, with the descriptor closed, if none is left. Keeping 0 to 2 occupied while a file is opened
    would not do: another thread can close one of them in that time.
    """
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


class OwnDescriptor:
    """A descriptor above 2 that takes over `number`. `close` closes it only if it still means the same file."""

    def __init__(self, number: int) -> None:
        self.number = move_above_standard_streams(number)
        self._identity = find_identity(self.number)

    def is_open(self) -> bool:
        """Return whether nobody has closed or replaced the descriptor."""
        return self._identity is not None and find_identity(self.number) == self._identity

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self.is_open():
            os.close(self.number)
        self._identity = None

"""Descriptors that stay the debugger's own: a program may close them, and open other files with their numbers."""

from __future__ import annotations

import os

Identity = tuple[int, int]


def find_identity(descriptor: int) -> Identity | None:
    """Return device and inode of an open descriptor, or None if it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class OwnDescriptor:
    """A descriptor of a file. `close` closes it only if its number still means the same file."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._identity = find_identity(number)

    def is_open(self) -> bool:
        """Return whether nobody has closed or replaced the descriptor."""
        return self._identity is not None and find_identity(self.number) == self._identity

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self.is_open():
            os.close(self.number)
        self._identity = None

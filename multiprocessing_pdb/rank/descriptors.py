"""Descriptors of a rank beyond the limit that the program has reached."""

from __future__ import annotations

import contextlib
import os
import resource

from multiprocessing_pdb.wire.own_descriptors import OwnDescriptor

_ROOM = 16  # descriptors for a stop: directory, sockets, modules


def _has_room() -> bool:
    opened = []
    try:
        for _ in range(_ROOM):
            opened.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True


class RoomForDescriptors:
    """Context manager that raises the process's soft limit if the program has nearly reached it.

    Not a generator: steps skip this module, and would stop in contextlib. It is for rare
    events, since the test for room takes descriptors from other threads for a moment.
    """

    def __init__(self) -> None:
        self._limits: tuple[int, int] | None = None

    def __enter__(self) -> None:
        if _has_room():
            return
        soft, hard = self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        raised = soft + _ROOM if hard == resource.RLIM_INFINITY else min(soft + _ROOM, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))

    def __exit__(self, *raised: object) -> None:
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


class Reserve:
    """Descriptors for the next console that connects when the process has none left."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: list[OwnDescriptor] = []

    def fill(self) -> None:
        """Open the missing descriptors, as far as the process has some left."""
        self._kept = [kept for kept in self._kept if kept.is_open()]
        if len(self._kept) == self._size:
            return
        with contextlib.suppress(OSError):
            while len(self._kept) < self._size:
                self._kept.append(OwnDescriptor(os.memfd_create("multiprocessing_pdb")))

    def give(self) -> None:
        """Close all, so that others can be opened."""
        while self._kept:
            self._kept.pop().close()

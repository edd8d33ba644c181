"""Timeouts of this process's collectives: raised while a rank is stopped, restored afterwards."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Hashable, Iterator
from datetime import timedelta
from typing import Any

from multiprocessing_pdb.rank.unstopped import UNSTOPPED

RAISED = timedelta(days=7)


def _find_backends() -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield each backend of each existing process group, with a key that outlives it."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    if module is None or world is None:
        return
    for group in list(world.pg_map):
        for device in group._device_types:
            with contextlib.suppress(
                RuntimeError, AttributeError, ValueError
            ):  # no backend for this device, or just destroyed
                yield (str(group.group_name), str(device)), group._get_backend(device)


def _read(backend: Any) -> timedelta | None:
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    return limit if isinstance(limit, timedelta) and hasattr(backend, "_set_default_timeout") else None


class Timeouts:
    """Raises the timeout of every process group while there is a reason.

    This is not a collective. A collective in flight keeps the timeout with which it began. No reference to
    a group is kept, so a group can be destroyed while its timeout is raised.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.limit = RAISED
        self._reasons: set[Hashable] = set()
        self._originals: dict[tuple[str, str], timedelta] = {}

    def hold(self, reason: Hashable) -> None:
        """Raise all timeouts until the reason is released."""
        with UNSTOPPED, self._lock:
            self._reasons.add(reason)
            self.extend()

    def extend(self) -> None:
        """Raise the timeouts of process groups created since, if there is a reason."""
        with UNSTOPPED, self._lock:
            for key, backend in _find_backends() if self._reasons else ():
                limit = _read(backend)
                if limit is not None and limit < self.limit:
                    self._originals[key] = limit
                    backend._set_default_timeout(self.limit)

    def release(self, reason: Hashable) -> None:
        """Release a reason, and restore the timeouts if it was the last."""
        with UNSTOPPED, self._lock:
            self._reasons.discard(reason)
            if self._reasons or not self._originals:
                return
            for key, backend in _find_backends():
                if key in self._originals:
                    backend._set_default_timeout(self._originals[key])
            self._originals.clear()

    def are_raised(self) -> bool:
        """Return whether a collective that starts now gets a raised timeout."""
        with UNSTOPPED, self._lock:
            return bool(self._originals)

    def shortest(self) -> float | None:
        """Return the shortest timeout in seconds as set by the program, or None without process groups."""
        with UNSTOPPED, self._lock:
            limits = [self._originals.get(key) or _read(backend) for key, backend in _find_backends()]
        seconds = [limit.total_seconds() for limit in limits if limit is not None]
        return min(seconds, default=None)

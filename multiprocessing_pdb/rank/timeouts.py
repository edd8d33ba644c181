"""The timeouts of this process's collectives: raised while somebody is stopped, restored afterwards."""

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
    """Yield each backend of each process group that exists, with a key that outlives it."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    if module is None or world is None:
        return
    for group in list(world.pg_map):
        for device in group._device_types:
            with contextlib.suppress(
                RuntimeError, AttributeError, ValueError
            ):  # none for this device, or just destroyed
                yield (str(group.group_name), str(device)), group._get_backend(device)


def _read(backend: Any) -> timedelta | None:
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    return limit if isinstance(limit, timedelta) and hasattr(backend, "_set_default_timeout") else None


class Timeouts:
    """Raises the timeout of every process group for as long as there is a reason.

    It is no collective. A collective that is already in flight keeps the timeout it was started with. No
    reference to a group is kept: destroying one while its timeout is raised is no different from before.
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
        """Raise those of process groups that were made since, if there is a reason."""
        with UNSTOPPED, self._lock:
            for key, backend in _find_backends() if self._reasons else ():
                limit = _read(backend)
                if limit is not None and limit < self.limit:
                    self._originals[key] = limit
                    backend._set_default_timeout(self.limit)

    def release(self, reason: Hashable) -> None:
        """Restore what was raised when this was the last reason."""
        with UNSTOPPED, self._lock:
            self._reasons.discard(reason)
            if self._reasons or not self._originals:
                return
            for key, backend in _find_backends():
                if key in self._originals:
                    backend._set_default_timeout(self._originals[key])
            self._originals.clear()

    def are_raised(self) -> bool:
        """Tell whether a collective that starts now gets a raised timeout."""
        with UNSTOPPED, self._lock:
            return bool(self._originals)

    def shortest(self) -> float | None:
        """Return the shortest timeout in seconds as the program set it; None without process groups."""
        with UNSTOPPED, self._lock:
            limits = [self._originals.get(key) or _read(backend) for key, backend in _find_backends()]
        seconds = [limit.total_seconds() for limit in limits if limit is not None]
        return min(seconds, default=None)

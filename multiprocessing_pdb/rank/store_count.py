"""Number of stopped ranks on all nodes, counted in the store of torch.distributed."""

from __future__ import annotations

import os
import sys
from typing import Any

_KEY = "multiprocessing_pdb/stopped"
_STOP_KEY = "multiprocessing_pdb/stop"


def spans_nodes() -> bool:
    """Return whether the job has ranks on other nodes, or MPDB_WATCH=store forces the use of the store."""
    local, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return os.environ.get("MPDB_WATCH") == "store" or (local is not None and local != world)


class StoreCount:
    """This process's contribution to the count, over a separate connection to the store."""

    def __init__(self) -> None:
        self._store: Any = None
        self._counted = False
        self._asked: int | None = None

    def update(self, is_stopped: bool) -> bool:
        """Update the contribution of this process, and return whether any other is stopped."""
        if self._store is None and not self._open():
            return False
        change = int(is_stopped) - int(self._counted)
        total = int(self._store.add(_KEY, change))
        self._counted = is_stopped
        return total > int(is_stopped)

    def ask_to_stop(self) -> None:
        """Request that the armed ranks of all nodes stop."""
        if self._store is not None or self._open():
            self._store.add(_STOP_KEY, 1)

    def is_asked_to_stop(self) -> bool:
        """Return whether a rank has requested a stop since the last call. The first call returns False."""
        if self._store is None and not self._open():
            return False
        count = int(self._store.add(_STOP_KEY, 0))
        known, self._asked = self._asked, count
        return known is not None and count > known

    def _open(self) -> bool:
        module = sys.modules.get("torch.distributed.distributed_c10d")
        if module is None or not module.is_initialized():
            return False
        # A store connection serves one call at a time, and the program may be waiting in one.
        self._store = module._get_default_store().clone()
        return True

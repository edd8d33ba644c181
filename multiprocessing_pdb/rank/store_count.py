"""How many ranks of all nodes are stopped, counted in the store of torch.distributed."""

from __future__ import annotations

import os
import sys
from typing import Any

_KEY = "multiprocessing_pdb/stopped"


def spans_nodes() -> bool:
    """Return whether the job has ranks on other nodes, or MPDB_WATCH=store asks for the store all the same."""
    local, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return os.environ.get("MPDB_WATCH") == "store" or (local is not None and local != world)


class StoreCount:
    """This process's share in the count, over a connection of its own to the store."""

    def __init__(self) -> None:
        self._store: Any = None
        self._counted = False

    def update(self, is_stopped: bool) -> bool:
        """Count this process in or out, and return whether any other is stopped."""
        if self._store is None and not self._open():
            return False
        change = int(is_stopped) - int(self._counted)
        total = int(self._store.add(_KEY, change))
        self._counted = is_stopped
        return total > int(is_stopped)

    def _open(self) -> bool:
        module = sys.modules.get("torch.distributed.distributed_c10d")
        if module is None or not module.is_initialized():
            return False
        # A store serves one call at a time, and the program may be waiting in one.
        self._store = module._get_default_store().clone()
        return True

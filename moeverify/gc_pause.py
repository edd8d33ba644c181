"""Pauses of Python's cyclic garbage collector. Does not import torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's cyclic garbage collector while many objects without reference cycles are created.

    The collector visits all objects whenever their number has grown by a certain amount. For the shards of
    256 ranks this takes several times as long as creating the objects (`benchmarks/many_ranks.py`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

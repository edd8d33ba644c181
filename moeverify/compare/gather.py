"""From all ranks to the first one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_on_first(value: T) -> list[T] | None:
    """Return every rank's value on rank 0, None elsewhere. Collective: all ranks of the default group."""
    gathered: list[T] | None = [value] * dist.get_world_size() if dist.get_rank() == 0 else None
    with uncollected():
        dist.gather_object(value, gathered)
    return gathered


@contextmanager
def uncollected() -> Iterator[None]:
    """Make many objects that refer to each other in no cycle, without a search for cycles among them.

    Python's collector visits all objects that there are whenever their number has grown by some. For the shards of
    256 ranks that takes several times as long as to make them (`benchmarks/many_ranks.py`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""Gathering of objects from all ranks on rank 0."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_on_first(value: T) -> list[T] | None:
    """Return the values of all ranks on rank 0, in rank order, and None elsewhere.

    This is a collective: all ranks of the default process group must call it. The value must be picklable.
    """
    gathered: list[T] | None = [value] * dist.get_world_size() if dist.get_rank() == 0 else None
    with uncollected():
        dist.gather_object(value, gathered)
    return gathered


def gather_on_all(value: T) -> list[T]:
    """Return the values of all ranks, in rank order; the own one alone without a process group.

    This is a collective: all ranks of the default process group must call it. The value must be picklable.
    """
    if not dist.is_initialized():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


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

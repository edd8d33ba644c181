"""Gathering of objects from all ranks on rank 0."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from moeverify.gc_pause import uncollected

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
    """Return the values of all ranks, in rank order; without a process group, only the own value.

    This is a collective: all ranks of the default process group must call it. The value must be picklable.
    """
    if not dist.is_initialized():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered

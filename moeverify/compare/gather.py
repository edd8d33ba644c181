"""From all ranks to the first one."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_on_first(value: T) -> list[T] | None:
    """Return every rank's value on rank 0, None elsewhere. Collective: all ranks of the default group."""
    gathered: list[T] | None = [value] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, gathered)
    return gathered

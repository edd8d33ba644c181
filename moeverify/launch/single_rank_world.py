"""A default process group of one rank, beside that of the job: for what a single device computes.

A user's factory may make process groups and meshes, or ask for the world size. What one device computes must be the
same wherever it is computed: in a golden that one of many ranks records, and in a diagnosis on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def single_rank_world(device: torch.device) -> Iterator[None]:
    """Let this rank be the only one of the default process group while the block runs.

    The groups of the job stay as they are and may be used again afterwards. Without a default group, and in one of a
    single rank, nothing is changed.
    """
    outer = dist.group.WORLD
    if outer is None or dist.get_world_size() == 1:
        yield
        return
    # The counter makes the names of groups, which all ranks of the job must count alike.
    count = distributed_c10d._world.group_count
    distributed_c10d._update_default_pg(None)
    try:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # By a name of its own: those that torch counts are taken by the groups of the job.
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]  # torch exports it without saying so
            rank=0,
            world_size=1,
            group_name="single_rank_world",
        )
        inner = dist.group.WORLD
        try:
            yield
        finally:
            distributed_c10d._update_default_pg(outer)
            dist.destroy_process_group(inner)
    finally:
        distributed_c10d._update_default_pg(outer)
        distributed_c10d._world.group_count = count

"""A default process group of one rank beside the group of the job, for single-device computations.

The factory of a user may create process groups and meshes or read the world size. A single-device
computation must give the same result wherever it runs: in a golden recorded by one of many ranks, and in a
diagnosis on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def single_rank_world(device: torch.device) -> Iterator[None]:
    """Make this rank the only one of the default process group inside the block.

    The groups of the job remain and may be used again afterwards. Does nothing without a default group or
    in a group of one rank.
    """
    outer = dist.group.WORLD
    if outer is None or dist.get_world_size() == 1:
        yield
        return
    # torch derives group names from this counter, which must agree on all ranks of the job.
    count = distributed_c10d._world.group_count
    distributed_c10d._update_default_pg(None)
    try:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # A fixed name, because the names that torch counts are taken by the groups of the job.
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]  # torch does not declare this export
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

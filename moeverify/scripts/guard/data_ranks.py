"""Detection of the ranks that share the global batch with this one, from the model's wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


def find_data_ranks(models: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the global ranks over which DDP or FSDP reduces most of the gradients, including this rank.

    Empty if no wrapper is found. Experts may have a smaller group than other parameters; the largest group
    counts.
    """
    found: set[int] = set()
    for model in models:
        for module in model.modules():
            ranks = _ranks_of(module)
            if len(ranks) > len(found):
                found = ranks
    return tuple(sorted(found))


def _ranks_of(module: nn.Module) -> set[int]:
    groups: list[Any] = []
    if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
        groups.append(module.process_group)
        groups.append(getattr(module, "_inter_node_pg", None))
    elif isinstance(module, FSDPModule):
        state: Any = module._get_fsdp_state()
        parts = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        meshes = [part.mesh_info.mesh for part in parts if part is not None]
        return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    return {rank for group in groups if group is not None for rank in dist.get_process_group_ranks(group)}

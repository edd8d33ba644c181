"""Fully sharded data parallelism by FSDP1: each block's parameters are one flat parameter, cut into runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from moeverify.model.transformer import Transformer
from moeverify.parallel.ddp import Accumulate
from moeverify.seams import seam

Strategy = Literal["full_shard", "shard_grad_op"]

STRATEGIES = {
    ("full_shard", 1): ShardingStrategy.FULL_SHARD,
    ("shard_grad_op", 1): ShardingStrategy.SHARD_GRAD_OP,
    ("full_shard", 2): ShardingStrategy.HYBRID_SHARD,
    ("shard_grad_op", 2): ShardingStrategy._HYBRID_SHARD_ZERO2,
}


def apply_fsdp1(
    model: Transformer, mesh: DeviceMesh, strategy: Strategy, device: torch.device
) -> tuple[nn.Module, Accumulate]:
    """Return the wrapped model and its context for a micro-batch; parameters must have their values.

    `mesh` is (fsdp) or, for a hybrid, (dp_replicate, fsdp). Gradients are averaged over all of it.
    """
    for name, block in model.layers.items():
        model.layers[name] = wrap_fsdp1(block, mesh, strategy, device)
    wrapped = wrap_fsdp1(model, mesh, strategy, device)
    return wrapped, lambda last: nullcontext() if last else wrapped.no_sync()


def wrap_fsdp1(
    module: nn.Module, mesh: DeviceMesh, strategy: Strategy, device: torch.device
) -> FullyShardedDataParallel:
    """Return one module whose parameters, less those of wrapped modules inside, are one flat parameter."""
    ranks = choose_ranks(mesh, strategy)
    return FullyShardedDataParallel(module, **ranks, device_id=device, use_orig_params=True)


@seam
def choose_ranks(mesh: DeviceMesh, strategy: Strategy) -> dict[str, Any]:
    """Return over which ranks parameters are sharded and gradients averaged, as FSDP's arguments.

    Replicas of one rank each are not sharded: a hybrid over them would keep to the one rank of a shard group
    and average over no replica, silently (pytorch #154888).
    """
    if mesh.ndim == 2 and mesh.size(1) == 1:
        return {"process_group": mesh.get_group(0), "sharding_strategy": ShardingStrategy.NO_SHARD}
    return {"device_mesh": mesh, "sharding_strategy": STRATEGIES[strategy, mesh.ndim]}

"""Fully sharded data parallelism by FSDP1: one flat parameter per block, sharded by contiguous ranges."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from moeverify.cases.schema import Fsdp1Strategy
from moeverify.model.transformer import Transformer
from moeverify.parallel.ddp import Accumulate
from moeverify.parallel.fsdp1_strategies import FSDP1_STRATEGY
from moeverify.seams import seam

STRATEGIES = {
    (option, num_axes): getattr(ShardingStrategy, member)
    for option, strategy in FSDP1_STRATEGY.rows.items()
    for num_axes, member in ((1, strategy.shards), (2, strategy.hybrid))
}


def apply_fsdp1(
    model: Transformer, mesh: DeviceMesh, strategy: Fsdp1Strategy, device: torch.device
) -> tuple[nn.Module, Accumulate]:
    """Return the wrapped model and its micro-batch context; parameters must already have their values.

    `mesh` is (fsdp) or, for a hybrid, (dp_replicate, fsdp). Gradients are averaged over the whole mesh.
    """
    # Wrap blocks first: parameters of wrapped blocks are excluded from the flat parameter of the model.
    for name, block in model.layers.items():
        model.layers[name] = wrap_fsdp1(block, mesh, strategy, device)
    wrapped = wrap_fsdp1(model, mesh, strategy, device)
    return wrapped, lambda last: nullcontext() if last else wrapped.no_sync()


def wrap_fsdp1(
    module: nn.Module, mesh: DeviceMesh, strategy: Fsdp1Strategy, device: torch.device
) -> FullyShardedDataParallel:
    """Return a module whose parameters, except those of wrapped submodules, are one flat parameter."""
    ranks = choose_ranks(mesh, strategy)
    # With `use_orig_params`, parameters are views into the flat one and the location of each shard is known
    # (`LocalShard`).
    return FullyShardedDataParallel(module, **ranks, device_id=device, use_orig_params=True)


@seam
def choose_ranks(mesh: DeviceMesh, strategy: Fsdp1Strategy) -> dict[str, Any]:
    """Return FSDP's arguments for the ranks to shard over and to average gradients over.

    When each shard group has a single rank, parameters are not sharded. A hybrid would then silently reduce
    within that one rank and not average over replicas (pytorch #154888).
    """
    if mesh.ndim == 2 and mesh.size(1) == 1:
        return {"process_group": mesh.get_group(0), "sharding_strategy": ShardingStrategy.NO_SHARD}
    return {"device_mesh": mesh, "sharding_strategy": STRATEGIES[strategy, mesh.ndim]}

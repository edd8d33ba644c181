"""Data parallelism for any model: torch's plain wrappers, with gradient accumulation.

A model that moeverify did not write is wrapped as one unit, which is correct for every model. To wrap each
block, or to apply other parallelism, a user provides a function in the case (`parallelize`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from moeverify.cases.schema import Layout
from moeverify.parallel.data_parallel import DATA_PARALLEL, DataRanks
from moeverify.parallel.meshes import Meshes


def apply_wrapper(
    model: nn.Module, layout: Layout, meshes: Meshes, device: torch.device, compute: torch.dtype | None = None
) -> nn.Module:
    """Return the model under the layout's data parallelism; parameters must already have their values.

    `compute` is the dtype of the arithmetic if it differs from the parameters' dtype (FSDP2 only).
    Gradients are averaged over the ranks of the loss. Collective: all ranks.
    """
    if meshes.size("loss") == 1:
        return model
    mesh = meshes.dense["dp_replicate", "fsdp"] if layout.dp_replicate > 1 else meshes.dense["fsdp"]
    ranks = DataRanks(layout, meshes, shard_mesh=mesh, expert_mesh=None, device=device)
    return DATA_PARALLEL.find(layout.data_parallel).wrap(model, ranks, compute)


def accumulate(model: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Return the context of a micro-batch for any wrapper; gradients are reduced only in the last one."""
    contexts = ExitStack()
    for wrapper in _outermost(model):
        if not last:
            contexts.enter_context(wrapper.no_sync())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Set on each unit separately: a user may have wrapped blocks without wrapping the model.
            module.set_requires_gradient_sync(last, recurse=False)
    return contexts if not last else nullcontext()


def keeps_flat_shards(model: nn.Module) -> bool:
    """Return whether parameters are shards stored as plain tensors, as under FSDP1."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _outermost(model: nn.Module) -> Iterator[DistributedDataParallel | FullyShardedDataParallel]:
    """Yield the outermost wrappers; their `no_sync` covers the inner ones."""
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)

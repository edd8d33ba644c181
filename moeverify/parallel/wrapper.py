"""Data parallelism for a model of any make: torch's plain wrappers around it, and accumulation under them.

A model that moeverify did not write is wrapped as one unit, which is right for every model; a user who wants
a wrapper for each block, or another parallelism, applies it in a function of the case (`parallelize`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from moeverify.case.schema import Layout
from moeverify.parallel.data_parallel import DATA_PARALLEL, DataRanks
from moeverify.parallel.meshes import Meshes


def apply_wrapper(
    model: nn.Module, layout: Layout, meshes: Meshes, device: torch.device, compute: torch.dtype | None = None
) -> nn.Module:
    """Return the model under the layout's data parallelism; parameters must have their values.

    `compute` is the dtype of the arithmetic where it is not that of the parameters, under FSDP2 only. Gradients
    are averaged over the ranks of the loss. Collective: all ranks.
    """
    if meshes.size("loss") == 1:
        return model
    mesh = meshes.dense["dp_replicate", "fsdp"] if layout.dp_replicate > 1 else meshes.dense["fsdp"]
    ranks = DataRanks(layout, meshes, shard_mesh=mesh, expert_mesh=None, device=device)
    return DATA_PARALLEL.find(layout.data_parallel).wrap(model, ranks, compute)


def accumulate(model: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Return the context of a micro-batch: gradients are reduced in the last one, under any of the wrappers."""
    contexts = ExitStack()
    for wrapper in _outermost(model):
        if not last:
            contexts.enter_context(wrapper.no_sync())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Of every unit by itself: a user may have wrapped blocks and not the model around them.
            module.set_requires_gradient_sync(last, recurse=False)
    return contexts if not last else nullcontext()


def keeps_flat_shards(model: nn.Module) -> bool:
    """Return whether parameters are shards without saying so, as FSDP1 keeps them."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _outermost(model: nn.Module) -> Iterator[DistributedDataParallel | FullyShardedDataParallel]:
    """Yield the wrappers that are in no other: `no_sync` of those reaches the ones inside."""
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)

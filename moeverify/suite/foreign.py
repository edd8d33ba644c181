"""A user's own model under a user's own or torch's plain data parallelism."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from moeverify.case.schema import ForeignModel, Layout, Recipe
from moeverify.errors import CaseError, Problem
from moeverify.layout.holding import buffers, parameters
from moeverify.parallel.collectives import sum_over
from moeverify.parallel.meshes import Meshes, build_meshes
from moeverify.train.assemble import build_foreign, share_of, sums_of
from moeverify.train.forward import resolve
from moeverify.train.program import Program


def assemble_foreign(recipe: Recipe, model: ForeignModel, layout: Layout, device: torch.device) -> Program:
    """Return this rank's program for a user's model.

    The factory runs on every rank under the recipe's seed. `layout.parallelize` is called as
    `parallelize(model, mesh)` with the mesh of the axes (dp_replicate, dp_shard, cp, tp) and returns the
    parallel model, whose gradients must be averaged over the data-parallel ranks, as DDP and FSDP do.
    Collective: all ranks.
    """
    meshes = build_meshes(layout, device.type)
    plain = build_foreign(model, recipe.seed, recipe.precision, device)
    parallel = _parallelize(plain, layout, meshes)
    flat = any(isinstance(module, FullyShardedDataParallel) for module in parallel.modules())
    return Program(
        model=parallel,
        holdings=parameters(parallel),
        buffers=buffers(parallel),
        routers=(),
        share=share_of(recipe, layout, meshes),
        device=device,
        sums=sums_of(layout, meshes),
        scale=float(meshes.size("loss")),
        num_micro_batches=layout.micro_batches,
        optimizer_implementation=layout.optimizer,
        accumulate=partial(_accumulate, parallel),
        sum_over_shards=partial(sum_over, group=meshes.group("fsdp")) if flat else None,
    )


def _parallelize(model: nn.Module, layout: Layout, meshes: Meshes) -> nn.Module:
    if layout.parallelize is None:
        return _data_parallel(model, layout, meshes)
    function = resolve(layout.parallelize, "layout.parallelize")
    mesh: DeviceMesh = meshes.data["dp_replicate", "dp_shard", "cp", "tp"]
    parallel = function(model, mesh)
    if not isinstance(parallel, nn.Module):
        message = f"`{layout.parallelize}` returned {type(parallel).__name__} and not a module"
        raise CaseError([Problem(message, path="layout.parallelize", remedy="return the parallel model")])
    return parallel


def _data_parallel(model: nn.Module, layout: Layout, meshes: Meshes) -> nn.Module:
    if meshes.size("loss") == 1:
        return model
    if layout.data_parallel == "ddp":
        return DistributedDataParallel(model, process_group=meshes.group("loss"))
    mesh = meshes.dense["dp_replicate", "fsdp"] if layout.dp_replicate > 1 else meshes.dense["fsdp"]
    fully_shard(model, mesh=mesh)
    return model


def _accumulate(model: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Return the context of a micro-batch for whichever wrapper the model has at its root."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        return nullcontext()
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()

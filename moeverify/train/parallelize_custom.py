"""A user's own function that parallelizes a model, and torch's plain wrappers in its place.

It is given any model: a user's, or the reference model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moeverify.case.schema import Layout
from moeverify.errors import CaseError, Problem
from moeverify.parallel.meshes import Meshes
from moeverify.parallel.wrapper import apply_wrapper
from moeverify.train.engine import Engine, PlainEngine
from moeverify.train.target import resolve

MESH_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelizedCustomModel:
    """A parallel model, what completes its gradients after the last backward pass, and what carries out its steps."""

    model: nn.Module
    finalize: Callable[[], object] | None = None
    engine: Engine = field(default_factory=PlainEngine)


def parallelize_custom(
    model: nn.Module, layout: Layout, meshes: Meshes, device: torch.device, compute: torch.dtype | None = None
) -> ParallelizedCustomModel:
    """Return the model under the layout: by the user's function where there is one, else by torch's wrapper.

    The function is called as `parallelize(model, mesh)` with the mesh of `MESH_AXES`, and returns the parallel
    model, or a pair of it and a function without arguments that completes the gradients of a step. The
    gradients must then be averaged over the ranks that see other tokens, as DDP and FSDP do. For example:

        def parallelize(model, mesh):
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp_shard"])
            return fully_shard(model, mesh=mesh["dp_shard"])

    Collective: all ranks.

    Raises: CaseError where the function returns something else.
    """
    if layout.parallelize is None:
        return ParallelizedCustomModel(apply_wrapper(model, layout, meshes, device, compute))
    function = resolve(layout.parallelize, "layout.parallelize")
    mesh: DeviceMesh = meshes.data[MESH_AXES]
    returned = function(model, mesh)
    parallel, finalize = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(parallel, nn.Module) or not (finalize is None or callable(finalize)):
        message = f"`{layout.parallelize}` returned {type(returned).__name__} and not a module"
        remedy = "return the parallel model, or (model, function that completes the gradients)"
        raise CaseError([Problem(message, path="layout.parallelize", remedy=remedy)])
    return ParallelizedCustomModel(parallel, finalize)

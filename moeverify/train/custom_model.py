"""A user's own model, and a user's own function that parallelizes a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moeverify.case.schema import CustomModel, Layout
from moeverify.errors import CaseError, Problem
from moeverify.parallel.meshes import Meshes
from moeverify.parallel.wrapper import apply_wrapper
from moeverify.train.program import dtype_of
from moeverify.train.target import describe_error, resolve

MESH_AXES = ("dp_replicate", "dp_shard", "cp", "tp")

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.bfloat16: torch.complex64}


@dataclass(frozen=True)
class Divided:
    """A model as a user's function left it, and what completes its gradients after the last backward pass."""

    model: nn.Module
    finalize: Callable[[], object] | None = None


def build_foreign(model: CustomModel, seed: int, precision: str, device: torch.device) -> nn.Module:
    """Return a user's model as its factory makes it under the seed, in the recipe's precision, ready to train.

    Raises: CaseError where the factory raises, or makes no module.
    """
    factory = resolve(model.factory, "recipe.model.factory")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            built = factory(**model.arguments)
        except Exception as error:
            message = f"`{model.factory}` failed: {describe_error(error)}"
            raise CaseError([Problem(message, path="recipe.model.factory")]) from error
    if not isinstance(built, nn.Module):
        message = f"`{model.factory}` returned {type(built).__name__} and not a module"
        raise CaseError([Problem(message, path="recipe.model.factory", remedy="return the model")])
    return cast(built.to(device), dtype_of(precision)).train()


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with its numbers of any precision in `dtype`; complex ones stay complex."""

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(_COMPLEX[dtype])
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    converted: nn.Module = model._apply(convert)  # type: ignore[no-untyped-call]  # `to` drops imaginary parts
    return converted


def divide(
    model: nn.Module, layout: Layout, meshes: Meshes, device: torch.device, compute: torch.dtype | None = None
) -> Divided:
    """Return the model under the layout: by the user's function where there is one, else by torch's wrapper.

    The function is called as `parallelize(model, mesh)` with the mesh of `MESH_AXES`, and returns the parallel
    model, or a pair of it and a function without arguments that completes the gradients of a step. The
    gradients must then be averaged over the ranks that see other tokens, as DDP and FSDP do. Collective: all
    ranks.

    Raises: CaseError where the function returns something else.
    """
    if layout.parallelize is None:
        return Divided(apply_wrapper(model, layout, meshes, device, compute))
    function = resolve(layout.parallelize, "layout.parallelize")
    mesh: DeviceMesh = meshes.data[MESH_AXES]
    returned = function(model, mesh)
    parallel, finalize = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(parallel, nn.Module) or not (finalize is None or callable(finalize)):
        message = f"`{layout.parallelize}` returned {type(returned).__name__} and not a module"
        remedy = "return the parallel model, or (model, function that completes the gradients)"
        raise CaseError([Problem(message, path="layout.parallelize", remedy=remedy)])
    return Divided(parallel, finalize)

"""The global gradient norm over parameters on different meshes, and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from moeverify.errors import CaseError, Problem
from moeverify.model.precision import widen
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.seams import seam

SumOverShards = Callable[[Tensor], Tensor]

GUARD = 1e-6
"""Added to the norm before `max_norm` is divided by it, as in torch.nn.utils.clip_grads_with_norm_."""


class GradientSource(Protocol):
    """An object that provides gradients, such as `moeverify.train.engine.Engine`."""

    def gradient(self, shard: LocalShard) -> Tensor | None:
        """Return the finished gradient of a parameter in the shape in which this rank stores it, or None."""


@seam
@torch.no_grad()
def gradient_norm(
    shards: Sequence[LocalShard],
    sum_over_shards: SumOverShards | None = None,
    sum_over_stages: SumOverShards | None = None,
) -> Tensor:
    """Return the 2-norm of all gradients, a tensor () that is equal on every rank.

    Its dtype is the widest of the gradients', and at least float32. torch computes a norm over gradients of
    one mesh at a time. This function computes one norm per mesh and combines them. `sum_over_shards` sums
    squares over the ranks that hold the other shards of plain tensors (FSDP1). `sum_over_stages` sums
    squares over pipeline stages. A tensor that two stages hold must be in `shards` only once. Collective:
    all ranks of each mesh.

    Raises: CaseError when no parameter has a gradient.
    """
    if all(shard.tensor.grad is None for shard in shards):
        raise missing_gradients()
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for shard in shards:
        # A parameter without a gradient here may have one on other ranks of its mesh, which reduce its
        # norm.
        gradient = torch.zeros_like(shard.tensor) if shard.tensor.grad is None else shard.tensor.grad
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(gradient)
    # A norm of few tensors in float32, such as the router's, must not round the float64 total of the
    # others.
    dtypes = {widen(gradient.dtype) for gradients in by_mesh.values() for gradient in gradients}
    dtype = max(dtypes, key=lambda each: each.itemsize)
    squares = []
    for mesh, gradients in by_mesh.items():
        # torch's foreach norm rejects DTensors of different meshes, which experts and the other parameters
        # have.
        norm = norm_of_one_mesh(gradients, dtype)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        square = norm.square()
        squares.append(sum_over_shards(square) if mesh is None and sum_over_shards else square)
    total = torch.stack(squares).sum()
    return (sum_over_stages(total) if sum_over_stages else total).sqrt()


@seam
def norm_of_one_mesh(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the 2-norm () of gradients that share a mesh, summed in `dtype`.

    `get_total_norm` keeps each tensor's norm and the total in the gradients' dtype. In bfloat16 the total
    is then off by up to 4e-3, more than the effect of counting one parameter twice. Megatron also computes
    norms in float32.
    """
    if all(gradient.dtype == dtype for gradient in gradients):
        return get_total_norm(gradients)
    # DTensor refuses torch._foreach_norm with a dtype in torch 2.14.
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


@seam
@torch.no_grad()
def norm_of_regions(engine: GradientSource, shards: Sequence[LocalShard], owned: Collection[str]) -> Tensor:
    """Return the 2-norm of all gradients in float64, shape () and equal on every rank, for any storage.

    `owned` names the parameters that this rank counts (`count_regions_once`). Plain tensors that only some
    ranks hold, such as a rank's experts, have no mesh that shows how many ranks hold each value.
    Collective: all ranks of the default process group.

    Raises: CaseError when no parameter has a gradient on this rank.
    """
    gradients = [(shard, engine.gradient(shard)) for shard in shards]
    found = [(shard, gradient) for shard, gradient in gradients if gradient is not None]
    if not found:
        raise missing_gradients()
    total = torch.zeros((), dtype=torch.float64, device=found[0][0].local().device)
    for shard, gradient in found:
        if shard.name in owned:
            total += shard.local(gradient).to(torch.float64).square().sum()
    dist.all_reduce(total)
    return total.sqrt()


def count_regions_once(shards: Sequence[LocalShard]) -> frozenset[str]:
    """Return the names of the parameters that this rank counts in a norm; the first of equal regions counts.

    Collective: all ranks of the default process group.
    """
    by_rank = _gather(_name_regions(shards))
    mine = dist.get_rank()
    before = frozenset[tuple[str, str]]().union(*by_rank[:mine])
    return frozenset(name for name, _ in by_rank[mine] - before)


def are_plain_tensors_everywhere(shards: Sequence[LocalShard]) -> bool:
    """Return whether all ranks hold the same regions in plain tensors.

    Collective: all ranks of the default process group.
    """
    plain = _gather(_name_regions([shard for shard in shards if not isinstance(shard.tensor, DTensor)]))
    return all(regions == plain[0] for regions in plain)


def _name_regions(shards: Sequence[LocalShard]) -> frozenset[tuple[str, str]]:
    return frozenset((shard.name, shard.region.key) for shard in shards)


def _gather(regions: frozenset[tuple[str, str]]) -> list[frozenset[tuple[str, str]]]:
    by_rank = [regions] * dist.get_world_size()
    dist.all_gather_object(by_rank, regions)
    return by_rank


def missing_gradients() -> CaseError:
    """Return the error for a model that has no gradient after the backward pass."""
    message = "no parameter has a gradient after the backward pass: every `.grad` is None"
    remedy = (
        "a framework that keeps gradients of its own (DeepSpeed, Megatron's `main_grad`) is verified through an "
        "engine: return (model, engine) from `parallelize`; else look whether the loss depends on this model"
    )
    return CaseError([Problem(message, path="layout.parallelize", remedy=remedy)])


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor () by which a clip scales gradients of this norm: min(1, max_norm / (norm + 1e-6)).

    A framework that clips like torch returns only the norm; this is the factor that it has applied.
    """
    return torch.clamp(max_norm / (norm + GUARD), max=1.0)


@seam
@torch.no_grad()
def clip_gradients(shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
    """Scale all gradients in place by the clip coefficient, and return the coefficient ()."""
    coefficient = clip_coefficient(norm, max_norm)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for shard in shards:
        if shard.tensor.grad is not None:
            by_dtype.setdefault(shard.tensor.grad.dtype, []).append(shard.local(shard.tensor.grad))
    for dtype, gradients in by_dtype.items():
        # One kernel launch for many tensors, as in torch.nn.utils.clip_grads_with_norm_.
        torch._foreach_mul_(gradients, coefficient.to(dtype))
    return coefficient

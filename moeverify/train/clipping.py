"""The global gradient norm over parameters that live on different meshes, and the clip by it."""

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
from moeverify.layout.local_shard import LocalShard
from moeverify.model.precision import widen
from moeverify.seams import seam

SumOverShards = Callable[[Tensor], Tensor]

GUARD = 1e-6
"""What is added to a norm before a limit is divided by it, as torch.nn.utils.clip_grads_with_norm_ has it."""


class GradientSource(Protocol):
    """Where the gradients are (`moeverify.train.engine.Engine`)."""

    def gradient(self, shard: LocalShard) -> Tensor | None:
        """Return the finished gradient of a parameter as it is stored here."""


@seam
@torch.no_grad()
def gradient_norm(
    shards: Sequence[LocalShard],
    sum_over_shards: SumOverShards | None = None,
    sum_over_stages: SumOverShards | None = None,
) -> Tensor:
    """Return the 2-norm of all gradients together, () and equal on every rank, in the widest dtype; float32 at least.

    torch's norm takes gradients of one mesh at a time, so there is one norm a mesh, and they are combined.
    `sum_over_shards` is for gradients that are shards without saying so (FSDP1): it sums squares over the
    ranks that hold the other shards. `sum_over_stages` sums squares over the stages of a pipeline; of what
    two stages hold, `shards` must have one. Collective: all ranks of each mesh.

    Raises: CaseError where no parameter has a gradient.
    """
    if all(shard.tensor.grad is None for shard in shards):
        raise missing_gradients()
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for shard in shards:
        # A parameter that got no gradient here may have one on the other ranks of its mesh, which reduce its norm.
        gradient = torch.zeros_like(shard.tensor) if shard.tensor.grad is None else shard.tensor.grad
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(gradient)
    # Norms of a few tensors in float32, such as a router's, would round the total of the others in float64.
    dtypes = {widen(gradient.dtype) for gradients in by_mesh.values() for gradient in gradients}
    dtype = max(dtypes, key=lambda each: each.itemsize)
    squares = []
    for mesh, gradients in by_mesh.items():
        # torch's foreach norm refuses DTensors of several meshes together: experts and the rest have two.
        norm = norm_of_one_mesh(gradients, dtype)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        square = norm.square()
        squares.append(sum_over_shards(square) if mesh is None and sum_over_shards else square)
    total = torch.stack(squares).sum()
    return (sum_over_stages(total) if sum_over_stages else total).sqrt()


@seam
def norm_of_one_mesh(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the 2-norm of gradients that share a mesh, (), summed in `dtype`.

    `get_total_norm` keeps the norm of each tensor, and that of all, in the gradients' dtype: in bfloat16 up to 4e-3
    off, more than a whole parameter makes that is counted twice. Megatron takes norms in float32 as well.
    """
    if all(gradient.dtype == dtype for gradient in gradients):
        return get_total_norm(gradients)
    norms: tuple[Tensor, ...] = torch._foreach_norm(list(gradients), 2.0, dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


@seam
@torch.no_grad()
def norm_of_regions(engine: GradientSource, shards: Sequence[LocalShard], owned: Collection[str]) -> Tensor:
    """Return the 2-norm of all gradients together, () and equal on every rank, wherever they lie; float64.

    `owned` names the parameters that this rank counts (`count_regions_once`): plain tensors that only some ranks
    hold, such as the experts of a rank, are on no mesh that could say how often each value is there.
    Collective: all ranks of the default process group.

    Raises: CaseError where no parameter has a gradient on this rank.
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
    """Return which parameters this rank counts in a norm: of equal regions, the first rank's.

    Collective: all ranks of the default process group.
    """
    by_rank = _gather(_name_regions(shards))
    mine = dist.get_rank()
    before = frozenset[tuple[str, str]]().union(*by_rank[:mine])
    return frozenset(name for name, _ in by_rank[mine] - before)


def are_plain_tensors_everywhere(shards: Sequence[LocalShard]) -> bool:
    """Return whether all ranks hold the same regions in plain tensors. Collective: as above."""
    plain = _gather(_name_regions([shard for shard in shards if not isinstance(shard.tensor, DTensor)]))
    return all(regions == plain[0] for regions in plain)


def _name_regions(shards: Sequence[LocalShard]) -> frozenset[tuple[str, str]]:
    return frozenset((shard.name, shard.region.key) for shard in shards)


def _gather(regions: frozenset[tuple[str, str]]) -> list[frozenset[tuple[str, str]]]:
    by_rank = [regions] * dist.get_world_size()
    dist.all_gather_object(by_rank, regions)
    return by_rank


def missing_gradients() -> CaseError:
    """Return what to say of a model none of whose parameters has a gradient after the backward pass."""
    message = "no parameter has a gradient after the backward pass: every `.grad` is None"
    remedy = (
        "a framework that keeps gradients of its own (DeepSpeed, Megatron's `main_grad`) is verified through an "
        "engine: return (model, engine) from `parallelize`; else look whether the loss depends on this model"
    )
    return CaseError([Problem(message, path="layout.parallelize", remedy=remedy)])


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return by what a clip scales gradients of this norm, (): min(1, max_norm / (norm + 1e-6)).

    A framework that clips as torch does returns the norm alone, and has scaled by this.
    """
    return torch.clamp(max_norm / (norm + GUARD), max=1.0)


@seam
@torch.no_grad()
def clip_gradients(shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
    """Scale all gradients by the coefficient of the clip, and return it, ()."""
    coefficient = clip_coefficient(norm, max_norm)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for shard in shards:
        if shard.tensor.grad is not None:
            by_dtype.setdefault(shard.tensor.grad.dtype, []).append(shard.local(shard.tensor.grad))
    for dtype, gradients in by_dtype.items():
        # One launch for many tensors, as torch.nn.utils.clip_grads_with_norm_ does it.
        torch._foreach_mul_(gradients, coefficient.to(dtype))
    return coefficient

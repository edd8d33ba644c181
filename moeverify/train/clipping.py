"""The global gradient norm over parameters that live on different meshes, and the clip by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from moeverify.layout.local_shard import LocalShard
from moeverify.model.precision import widen
from moeverify.seams import seam

SumOverShards = Callable[[Tensor], Tensor]


@seam
@torch.no_grad()
def gradient_norm(
    shards: Sequence[LocalShard],
    sum_over_shards: SumOverShards | None = None,
    sum_over_stages: SumOverShards | None = None,
) -> Tensor:
    """Return the 2-norm of all gradients together, () and equal on every rank; float32 at least.

    torch's norm takes gradients of one mesh at a time, so there is one norm a mesh, and they are combined.
    `sum_over_shards` is for gradients that are shards without saying so (FSDP1): it sums squares over the
    ranks that hold the other shards. `sum_over_stages` sums squares over the stages of a pipeline; of what
    two stages hold, `shards` must have one. Collective: all ranks of each mesh.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for shard in shards:
        # A parameter that got no gradient here may have one on the other ranks of its mesh, which reduce its norm.
        gradient = torch.zeros_like(shard.tensor) if shard.tensor.grad is None else shard.tensor.grad
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(gradient)
    squares = []
    for mesh, gradients in by_mesh.items():
        # torch's foreach norm refuses DTensors of several meshes together: experts and the rest have two.
        norm = get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        # Squares and their sums over shards and stages would each round a narrow norm once more.
        square = norm.to(widen(norm.dtype)).square()
        squares.append(sum_over_shards(square) if mesh is None and sum_over_shards else square)
    total = torch.stack(squares).sum()
    return (sum_over_stages(total) if sum_over_stages else total).sqrt()


@seam
@torch.no_grad()
def clip_gradients(shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)) and return that coefficient, ()."""
    # As torch.nn.utils.clip_grads_with_norm_ has it; 1e-6 keeps a norm of zero from dividing by it.
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for shard in shards:
        if shard.tensor.grad is not None:
            shard.local(shard.tensor.grad).mul_(coefficient.to(shard.tensor.grad.dtype))
    return coefficient

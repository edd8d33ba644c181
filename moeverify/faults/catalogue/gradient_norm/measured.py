"""Helpers of this class: norms of changed gradients, and sums over other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moeverify.faults.patch import Original, Patch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.parallel.regions.local_shard import LocalShard


def change_gradients(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Compute the norm of `change(gradient)` for each gradient; the gradients themselves stay unchanged."""
    import torch

    from moeverify.train.clipping import norm_of_one_mesh

    @patch.wrap(norm_of_one_mesh)
    def measure_changed(
        original: Original[Tensor], gradients: Sequence[Tensor], dtype: torch.dtype
    ) -> Tensor:
        return original([change(gradient) for gradient in gradients], dtype)


def expert_mesh(gradient: Tensor) -> DeviceMesh | None:
    """Return the mesh over which a gradient is sharded if it has an ep axis, else None."""
    from torch.distributed.tensor import DTensor

    if not isinstance(gradient, DTensor):
        return None
    mesh = gradient.device_mesh
    return mesh if "ep" in (mesh.mesh_dim_names or ()) else None


def sum_squares_over_world(patch: Patch, applies: Callable[[Sequence[LocalShard], bool], bool]) -> None:
    """Sum the squares of plain-tensor gradients over all ranks, where `applies` is true.

    `applies` gets the shards, and whether their squares are summed over some ranks already.
    """
    from functools import partial

    import torch.distributed as dist

    from moeverify.parallel.collectives import sum_over
    from moeverify.train.clipping import SumOverShards, gradient_norm

    @patch.wrap(gradient_norm)
    def sum_over_world(
        original: Original[Tensor],
        shards: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        if applies(shards, sum_over_shards is not None):
            assert dist.group.WORLD is not None
            sum_over_shards = partial(sum_over, group=dist.group.WORLD)
        return original(shards, sum_over_shards, sum_over_stages)

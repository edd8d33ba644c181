"""The squared norms of shards are also summed over the replicas."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Sum the squares over all data ranks (here all ranks) instead of over one replica."""
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    from moeverify.parallel.collectives import sum_over
    from moeverify.parallel.regions.placement import local_part
    from moeverify.train.clipping import norm_of_one_mesh

    @patch.wrap(norm_of_one_mesh)
    def sum_over_all(original: Original[Tensor], gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        norm = original([local_part(gradient) for gradient in gradients], dtype)
        if not any(isinstance(gradient, DTensor) for gradient in gradients):
            return norm
        assert dist.group.WORLD is not None
        return sum_over(norm.square(), dist.group.WORLD).sqrt()


FAULT = Fault(
    number="H05",
    title="the gradient norm of HSDP counts every replica",
    source="ByteDance-Seed/VeOmni #184",
    mechanism="squares are summed over replicas and shards instead of the shards alone: sqrt(replicas)",
    trigger="HSDP",
    case=make_case("h05", preset="tiny-gpt", dp_replicate=2, dp_shard=2),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM),), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
)

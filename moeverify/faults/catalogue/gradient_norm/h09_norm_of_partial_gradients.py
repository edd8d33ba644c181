"""The norm of a partial gradient is taken on each rank, and these norms are added."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Record the norms of partial sums before the reduction, and use them instead of the sums' norms."""
    import torch
    from torch import Tensor

    from moeverify.parallel.collectives import sum_over
    from moeverify.parallel.gradients import Reduction, finalize_gradients
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.parallel.regions.placement import local_part
    from moeverify.train.clipping import SumOverShards, gradient_norm

    norms: dict[int, Tensor] = {}

    @patch.wrap(finalize_gradients)
    def remember_norms(
        original: Original[None], parameters: Sequence[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        for reduction in reductions:
            for parameter in reduction.parameters:
                if parameter.grad is not None and reduction.group is not None:
                    norms[id(parameter)] = sum_over(local_part(parameter.grad).norm(), reduction.group)
        original(parameters, reductions)

    @patch.wrap(gradient_norm)
    def add_norms(
        original: Original[Tensor],
        shards: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        whole = [shard for shard in shards if id(shard.tensor) not in norms]
        partial = [norms.pop(id(shard.tensor)) for shard in shards if id(shard.tensor) in norms]
        rest = original(whole, sum_over_shards, sum_over_stages)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([rest, *partial]))
        return norm


FAULT = Fault(
    number="H09",
    title="the norm of partial gradients is the sum of the norms on each rank",
    source="pytorch/pytorch PR #159856",
    mechanism="the norm of a DTensor placed Partial is computed on each rank's partial sum and then reduced",
    trigger="tp with gradients that are still partial sums",
    case=make_case("h09", preset="tiny-gpt", model={"qk_norm": True}, tp=2),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM),), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
)

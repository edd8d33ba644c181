"""The norm of a gradient that is a sum over ranks is taken of the addends, and these norms are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.placement import local_part
from moeverify.parallel import plan
from moeverify.parallel.collectives import sum_over
from moeverify.parallel.gradients import Reduction
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage
from moeverify.train import loop
from moeverify.train.clipping import SumOverShards


def inject() -> None:
    """Remember the norms of addends before they are summed, and let them stand for those of the sums."""
    norms: dict[int, Tensor] = {}

    def finalize_gradients(parameters: Sequence[Tensor], reductions: Sequence[Reduction]) -> None:
        for reduction in reductions:
            for parameter in reduction.parameters:
                if parameter.grad is not None and reduction.group is not None:
                    norms[id(parameter)] = sum_over(local_part(parameter.grad).norm(), reduction.group)
        finalize(parameters, reductions)

    def gradient_norm(holdings: Sequence[LocalShard], *sums: SumOverShards | None) -> Tensor:
        whole = [held for held in holdings if id(held.tensor) not in norms]
        summed = [norms.pop(id(held.tensor)) for held in holdings if id(held.tensor) in norms]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([measure(whole, *sums), *summed]))
        return norm

    finalize, measure = plan.finalize_gradients, loop.gradient_norm
    plan.finalize_gradients, loop.gradient_norm = finalize_gradients, gradient_norm


FAULT = Fault(
    number="H09",
    title="the norm of partial gradients is the sum of their addends' norms",
    source="pytorch/pytorch PR #159856",
    mechanism="the norm of a DTensor placed Partial is computed on each rank's addend and then reduced",
    trigger="tp with gradients that are still addends",
    case=make_case("h09", preset="tiny-gpt", model={"qk_norm": True}, tp=2),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM),), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
)

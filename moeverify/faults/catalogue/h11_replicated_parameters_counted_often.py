"""The squares of replicated gradients are summed over the ranks of the shards, once a copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.layout.local_shard import LocalShard
from moeverify.parallel.collectives import sum_over
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage
from moeverify.train import loop
from moeverify.train.clipping import SumOverShards


def inject() -> None:
    """Sum the squares of plain gradients over the ranks of the shards, which in the case are all ranks."""

    def gradient_norm(
        holdings: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        if any(isinstance(held.tensor, DTensor) for held in holdings):
            assert dist.group.WORLD is not None
            sum_over_shards = partial(sum_over, group=dist.group.WORLD)
        return original(holdings, sum_over_shards, sum_over_stages)

    original = loop.gradient_norm
    loop.gradient_norm = gradient_norm


FAULT = Fault(
    number="H11",
    title="the gradient norm counts a replicated parameter once a rank",
    source="mindspore-ai/hyper-parallel #526",
    mechanism="norms of parameters that are not sharded go into the sum over the shard group like those of shards",
    trigger="shards beside replicated parameters",
    case=make_case("h11", preset="tiny-gpt", tp=2),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM),), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
    notes="upstream's shards were FSDP's; here they are those of tp, beside which the norms are replicated",
)

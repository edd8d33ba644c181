"""FSDP1 without sharding sums the norms of whole gradients over the ranks, once a copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

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
    """Sum squares over all ranks that FSDP wraps, which in the case hold copies and no shards."""

    def gradient_norm(
        holdings: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        if sum_over_shards is not None:
            assert dist.group.WORLD is not None
            sum_over_shards = partial(sum_over, group=dist.group.WORLD)
        return original(holdings, sum_over_shards, sum_over_stages)

    original = loop.gradient_norm
    loop.gradient_norm = gradient_norm


FAULT = Fault(
    number="H04",
    title="the gradient norm of FSDP1 without sharding counts every copy",
    source="pytorch/pytorch PR #88955",
    mechanism="clip_grad_norm_ sums the squares over the process group whether or not its ranks hold shards: sqrt(n)",
    trigger="FSDP1 with NO_SHARD",
    case=make_case("h04", preset="tiny-gpt", dp_replicate=2, data_parallel="fsdp1"),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM),), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
)

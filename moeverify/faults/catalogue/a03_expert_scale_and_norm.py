"""Expert gradients are ep times too large, and the norm averages experts over ranks where it should add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.case.schema import Layout
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.layout.local_shard import LocalShard
from moeverify.parallel import plan
from moeverify.parallel.gradients import Reduction
from moeverify.parallel.meshes import Meshes
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.train import loop
from moeverify.train.clipping import SumOverShards


def inject() -> None:
    """Leave out 1/ep, and treat experts in the norm as if all data-parallel ranks held the same."""

    def reduce_experts(experts: Sequence[Tensor], layout: Layout, meshes: Meshes) -> list[Reduction]:
        return [replace(reduction, divisor=1.0) for reduction in original(experts, layout, meshes)]

    original = plan._expert_reductions
    plan._expert_reductions = reduce_experts
    loop.gradient_norm = _average_norm


def _average_norm(holdings: Sequence[LocalShard], *_: SumOverShards | None) -> Tensor:
    squares = [
        held.local(held.tensor.grad).square().sum() for held in holdings if held.tensor.grad is not None
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).sqrt()


FAULT = Fault(
    number="A03",
    title="expert gradients ep times too large, and a norm that averages over ranks what it should add",
    source="deepspeedai/DeepSpeed PR #5259",
    mechanism="1/ep is missing, and the squared norm is averaged over all data ranks, experts included",
    trigger="expert parallelism over data-parallel ranks, with a clip",
    case=make_case("a03", dp_replicate=2, data_parallel="ddp", ep=2),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SCALE,)),
    inject=inject,
    notes="two mistakes of one pull request; the gradients come first, the norm is wrong beyond what they explain",
)

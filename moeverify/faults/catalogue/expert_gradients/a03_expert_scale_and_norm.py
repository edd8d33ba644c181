"""Expert gradients are ep times too large, and the norm averages experts over ranks instead of summing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeverify.faults.catalogue.expert_gradients.reductions import change_reductions
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Omit 1/ep, and compute the norm as if all data-parallel ranks had the same experts."""
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.clipping import SumOverShards, gradient_norm

    change_reductions(patch, lambda reduction, _: replace(reduction, divisor=1.0))

    @patch.replace(gradient_norm)
    def average_norm(
        shards: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        gradients = [shard.local(shard.tensor.grad) for shard in shards if shard.tensor.grad is not None]
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
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

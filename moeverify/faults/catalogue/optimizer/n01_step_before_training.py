"""A step that only creates the optimizer's state increments its counters."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Step a fresh optimizer once on zero gradients, with rate 0."""
    import torch
    from torch.optim import Optimizer

    from moeverify.cases.schema import Optimizer as OptimizerSpec
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.optimizer import build_optimizer

    @patch.wrap(build_optimizer)
    def step_once(
        original: Original[Optimizer], spec: OptimizerSpec, shards: Sequence[LocalShard], kernels: str
    ) -> Optimizer:
        optimizer = original(spec, shards, kernels)
        rates = [group["lr"] for group in optimizer.param_groups]
        for shard in shards:
            shard.tensor.grad = torch.zeros_like(shard.tensor)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        return optimizer


FAULT = Fault(
    number="N01",
    title="the optimizer begins one step too late",
    source="NVIDIA/Megatron-LM PR #5976 (ce8a8a736f)",
    mechanism=(
        "a synthetic step that creates the optimizer's state leaves its counter at 1, and the bias "
        "correction is that of the next step"
    ),
    trigger="a state that is made before training",
    case=make_case("n01", preset="tiny-gpt", dp_shard=2, optimizer="adamw"),
    expected=Expected(where=(At(stage=Stage.OPTIMIZER_STEP),), causes=(Cause.STATE,)),
    inject=inject,
    is_moe=False,
)

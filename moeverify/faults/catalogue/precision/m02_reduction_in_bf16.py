"""Gradients are reduced over the data ranks in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Set FSDP2's reduce dtype to bfloat16; parameters and computation keep the recipe's precision."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from moeverify.parallel import fsdp2

    @patch.wrap(fully_shard, used_by=fsdp2)
    def reduce_narrow(original: Original[Any], *args: Any, **named: Any) -> Any:
        policy = replace(named["mp_policy"], reduce_dtype=torch.bfloat16)
        return original(*args, **{**named, "mp_policy": policy})


FAULT = Fault(
    number="M02",
    title="gradients are reduced in bfloat16",
    source="pytorch/pytorch #106395, PR #194628",
    mechanism="the sums over ranks, and over replicas in HSDP, are held in the dtype of the reduction",
    trigger="FSDP or HSDP with a bfloat16 reduction",
    case=make_case("m02", dp_replicate=2, dp_shard=2, recipe={"precision": "float32"}),
    expected=Expected(where=(At(stage=Stage.BACKWARD),), causes=(Cause.ROUNDING,)),
    inject=inject,
    precisions=("float64", "float32"),
    is_moe=False,
    notes=(
        "every gradient is at fault, so every place counts as right; shown in a float32 recipe, since a bfloat16 "
        "recipe keeps all gradients in bfloat16 anyway; M04 is the same in mixed precision"
    ),
)

"""Gradients are reduced over the data ranks in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.parallel import fsdp2
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject() -> None:
    """Give FSDP2 a reduction in bfloat16; parameters and computation keep the recipe's precision."""

    def shard(*arguments: Any, mp_policy: MixedPrecisionPolicy, **rest: Any) -> Any:
        return fully_shard(*arguments, mp_policy=replace(mp_policy, reduce_dtype=torch.bfloat16), **rest)

    fsdp2.fully_shard = shard


FAULT = Fault(
    number="M02",
    title="gradients are reduced in bfloat16",
    source="pytorch/pytorch #106395, PR #194628",
    mechanism="the sums over ranks, and over replicas in HSDP, are held in the dtype of the reduction",
    trigger="FSDP or HSDP with a bfloat16 reduction",
    case=make_case("m02", dp_replicate=2, dp_shard=2, recipe={"precision": "float32"}),
    expected=Expected(where=(At(stage=Stage.BACKWARD),), causes=(Cause.ROUNDING,)),
    inject=inject,
    is_moe=False,
    notes=(
        "every gradient is at fault, so every place counts as right; shown in a float32 recipe, since a bfloat16 "
        "recipe keeps all gradients in bfloat16 anyway; M04 is the same in mixed precision"
    ),
)

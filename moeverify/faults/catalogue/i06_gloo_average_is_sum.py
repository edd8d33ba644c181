"""The average of a reduce-scatter over gloo is a sum."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

# torch 2.13 renamed it.
_NAME = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def inject() -> None:
    """Let a reduce-scatter that asks for the average sum."""

    def reduce_scatter(*tensors: Any, op: Any = dist.ReduceOp.SUM, **arguments: Any) -> Any:
        return original(*tensors, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **arguments)

    original = getattr(dist, _NAME)
    setattr(dist, _NAME, reduce_scatter)


FAULT = Fault(
    number="I06",
    title="FSDP's gradients over gloo are the world's size too large",
    source="pytorch/pytorch #162338, PR #162344",
    mechanism="gloo's reduce_scatter takes AVG and does not divide",
    trigger="FSDP2 over gloo in a dtype that it averages inside the collective: float32 or bfloat16",
    case=make_case("i06", preset="tiny-gpt", recipe={"precision": "float32"}, dp_shard=2),
    expected=Expected(where=(At(axis="dp_shard"), At(axis="fsdp")), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
)

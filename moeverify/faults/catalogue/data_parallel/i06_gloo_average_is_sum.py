"""A reduce-scatter with AVG over gloo computes a sum."""

from __future__ import annotations

from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Replace AVG by SUM in every reduce-scatter."""
    import torch.distributed as dist

    # Renamed in torch 2.13.
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    @patch.wrap(reduce_scatter, used_by=dist)
    def sum_always(original: Original[Any], *tensors: Any, op: Any = dist.ReduceOp.SUM, **named: Any) -> Any:
        return original(*tensors, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **named)


FAULT = Fault(
    number="I06",
    title="FSDP's gradients over gloo are the world's size too large",
    source="pytorch/pytorch #162338, PR #162344",
    mechanism="gloo's reduce_scatter takes AVG and does not divide",
    trigger="FSDP2 over gloo in a dtype that it averages inside the collective: float32 or bfloat16",
    case=make_case("i06", preset="tiny-gpt", recipe={"precision": "float32"}, dp_shard=2),
    expected=Expected(where=(At(axis="dp_shard"), At(axis="fsdp")), causes=(Cause.SCALE,)),
    inject=inject,
    precisions=("float32", "bfloat16", "mixed"),
    is_moe=False,
)

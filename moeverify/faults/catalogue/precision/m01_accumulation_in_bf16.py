"""Gradients of micro-batches are accumulated in bfloat16 and widened only for the reduction."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Round the gradients that FSDP2 keeps between micro-batches."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    @patch.wrap(FSDPParam.to_accumulated_grad_if_needed)
    def accumulate_narrow(original: Original[None], self: FSDPParam) -> None:
        original(self)
        gradient = self._unsharded_param.grad
        if gradient is not None:
            gradient.copy_(gradient.to(torch.bfloat16))


FAULT = Fault(
    number="M01",
    title="micro-batch gradients are accumulated in bfloat16",
    source="ISEEKYAN/Megatron-LM #149, PR #146",
    mechanism="the buffer between micro-batches is bfloat16, only the last reduction is float32",
    trigger="FSDP with gradient accumulation",
    case=make_case("m01", dp_shard=2, micro_batches=4, recipe={"precision": "float32"}),
    expected=Expected(where=(At(stage=Stage.BACKWARD),), causes=(Cause.ROUNDING,)),
    inject=inject,
    precisions=("float64", "float32"),
    is_moe=False,
    notes=(
        "every gradient is at fault, so every place counts as right; shown in a float32 recipe, since a bfloat16 "
        "recipe keeps all gradients in bfloat16 anyway"
    ),
)

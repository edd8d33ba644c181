"""The outputs of expert slices are summed over TP in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moeverify.diagnose.cause import Cause
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.parallel import moe_tensor


def inject() -> None:
    """Cast the partial outputs to bfloat16 for the reduction of the combine."""

    def reduce_from(partial: Tensor, group: ProcessGroup) -> Tensor:
        return original(partial.to(torch.bfloat16), group).to(partial.dtype)

    original = moe_tensor.reduce_from
    moe_tensor.reduce_from = reduce_from


FAULT = Fault(
    number="M03",
    title="combine is reduced over TP in bfloat16",
    source="NVIDIA/Megatron-LM !2942 (325e7c8017)",
    mechanism="the reduction over TP is not done in the wider dtype of the router",
    trigger="TP + EP with experts sliced over TP",
    case=make_case("m03", dp_shard=2, tp=2, ep=2, etp=2, recipe={"precision": "float32"}),
    expected=Expected(where=r"moe", causes=(Cause.ROUNDING,)),
    inject=inject,
)

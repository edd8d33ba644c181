"""The outputs of expert slices are summed over tp in bfloat16."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Cast the partial outputs to bfloat16 for the reduction of the combine."""
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import reduce_from

    @patch.wrap(reduce_from, used_by=moe_tensor)
    def reduce_narrow(original: Original[Tensor], x: Tensor, group: ProcessGroup) -> Tensor:
        return original(x.to(torch.bfloat16), group).to(x.dtype)


FAULT = Fault(
    number="M03",
    title="combine is reduced over TP in bfloat16",
    source="NVIDIA/Megatron-LM !2942 (325e7c8017)",
    mechanism="the reduction over TP is not done in the wider dtype of the router",
    trigger="TP + EP with experts sliced over TP",
    case=make_case("m03", dp_shard=2, tp=2, ep=2, etp=2, recipe={"precision": "float32"}),
    expected=Expected(where=(At(name="layers.1.moe*"), At(axis="tp")), causes=(Cause.ROUNDING,)),
    inject=inject,
    precisions=("float64", "float32"),
    notes=(
        "shown in a float32 recipe, since in a bfloat16 recipe the layout reduces in bfloat16 itself; "
        "the mechanism is known from the title of the source only"
    ),
)

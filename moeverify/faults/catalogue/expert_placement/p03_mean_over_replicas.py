"""The gradient of an expert is averaged over its replicas, as if each had seen the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.faults.catalogue.expert_placement.moves import make_placed_case
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from torch import Tensor

    from moeverify.parallel.holder_groups import HolderGroup


def inject(patch: Patch) -> None:
    """Divide by the number of holders as well."""
    import torch.distributed as dist

    from moeverify.parallel.placed_experts import start_sum

    @patch.wrap(start_sum)
    def averaged(original: Original[dist.Work | None], whole: Tensor, group: HolderGroup) -> dist.Work | None:
        whole /= len(group.ranks)
        return original(whole, group)


FAULT = Fault(
    number="P03",
    title="expert gradients are averaged over their replicas",
    source="no report known; the divisor of NVIDIA/Megatron-LM's data-parallel groups applied to holders",
    mechanism="each group of holders averages, so experts with replicas learn more slowly than those without",
    trigger="replicas of some experts",
    case=make_placed_case("p03"),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SCALE,)),
    inject=inject,
)

"""Data parallelism skips the gradients of experts, even if several ranks hold the same expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.faults.catalogue.expert_placement.moves import make_placed_case
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from torch import Tensor

    from moeverify.parallel.holder_groups import HolderGroup


def inject(patch: Patch) -> None:
    """Skip the sum of the replicas' gradients."""
    from moeverify.parallel.placed_experts import start_sum

    @patch.replace(start_sum)
    def nothing(whole: Tensor, group: HolderGroup) -> None:
        return None


FAULT = Fault(
    number="P01",
    title="replicas of an expert never sum their gradients",
    source="facebookresearch/fairseq #4220",
    mechanism="DDP skips every parameter that is marked as an expert's, also those that several ranks hold",
    trigger="more ranks than experts, or replicas of hot experts",
    case=make_placed_case("p01"),
    expected=Expected(
        where=(At(name="*.moe.experts*"),), causes=(Cause.MISSING_REDUCTION, Cause.SHARE_WEIGHTS)
    ),
    inject=inject,
)

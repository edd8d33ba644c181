"""One holder of an expert does not contribute its gradient, so the sum lacks the tokens it computed."""

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
    """Zero the contribution of the last of several holders."""
    import torch.distributed as dist

    from moeverify.parallel.placed_experts import start_sum

    @patch.wrap(start_sum)
    def without_last(
        original: Original[dist.Work | None], whole: Tensor, group: HolderGroup
    ) -> dist.Work | None:
        if len(group.ranks) > 1 and dist.get_rank() == group.ranks[-1]:
            whole.zero_()
        return original(whole, group)


FAULT = Fault(
    number="P02",
    title="one replica of an expert is left out of the sum of its gradient",
    source="no report known; after facebookresearch/fairseq #4220, where all are left out",
    mechanism="the list of holders is that of before a replica was added: what it computed is lost",
    trigger="replicas",
    case=make_placed_case("p02"),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
)

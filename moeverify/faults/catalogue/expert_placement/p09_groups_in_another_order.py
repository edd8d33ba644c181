"""One rank created the holder groups in another order, and uses the group of other experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.faults.catalogue.expert_placement.moves import make_placed_case
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from moeverify.parallel.holder_groups import HolderGroup, HolderGroups, Holders

PAIRS = ((0, 1, 2, 3, 8), (0, 4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
"""Experts 0 and 8 are on two ranks each, both including rank 0, with gradients and groups of equal size."""


def inject(patch: Patch) -> None:
    """Let rank 0 use its groups of two ranks in reversed order."""
    import torch.distributed as dist

    from moeverify.parallel.holder_groups import HolderGroups

    @patch.wrap(HolderGroups.find)
    def find(original: Original[HolderGroup], self: HolderGroups, holders: Holders) -> HolderGroup:
        if dist.get_rank() != 0 or len(holders) != 2:
            return original(self, holders)
        pairs = [each for each in self.list_own() if len(each) == 2]
        return original(self, pairs[::-1][pairs.index(holders)])


FAULT = Fault(
    number="P09",
    title="one rank makes the groups of replicas in another order",
    source="the warning of torch.distributed.new_group: all ranks must make all groups in the same order",
    mechanism="groups are found by their number, and one rank has gone through its experts in another order",
    trigger="two experts with replicas on as many ranks, one rank among both",
    case=make_placed_case("p09", dp_shard=4, ep=4, placement=PAIRS),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.COLLECTIVES,)),
    inject=inject,
)

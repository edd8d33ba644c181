"""Weights move to the slots of the new placement, but moments stay and then belong to other experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeverify.faults.catalogue.expert_placement.moves import change_moves, make_exchange_case
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.parallel.move_experts import Journey


def inject(patch: Patch) -> None:
    """Move only the weights."""

    def leave_moments(
        before: Sequence[Tensor], after: list[Tensor], journey: Journey, group: ProcessGroup
    ) -> list[Tensor]:
        return [after[0], *(moment.clone() for moment in before[1:])]

    change_moves(patch, leave_moments)


FAULT = Fault(
    number="P10",
    title="an exchange leaves the moments in the slots of other experts",
    source="no report known; the optimizer's half of vllm-project/vllm #55228",
    mechanism="the optimizer's state belongs to a slot, and an exchange copies weights between slots",
    trigger="an exchange of experts that leaves the number of experts on each rank as it was",
    case=make_exchange_case("p10"),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.CARRIED_STATE,)),
    inject=inject,
)

"""Experts move without their moments, which start from zero on the new rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeverify.faults.catalogue.expert_placement.moves import (
    change_moves,
    list_arrivals,
    make_exchange_case,
)
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.parallel.move_experts import Journey


def inject(patch: Patch) -> None:
    """Zero the moments of arriving experts."""

    def without_moments(
        before: Sequence[Tensor], after: list[Tensor], journey: Journey, group: ProcessGroup
    ) -> list[Tensor]:
        for moment in after[1:]:
            for row, _ in list_arrivals(journey, group.rank()):
                moment[row] = 0
        return after

    change_moves(patch, without_moments)


FAULT = Fault(
    number="P04",
    title="experts are exchanged without their moments",
    source="no report known; the optimizer's half of vllm-project/vllm #55228",
    mechanism="an exchange made for inference moves weights alone, and is used in training",
    trigger="an exchange of experts during training",
    case=make_exchange_case("p04"),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.CARRIED_STATE,)),
    inject=inject,
)

"""A new replica of an expert never gets its weights, and diverges from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeverify.faults.catalogue.expert_placement.moves import (
    REPLICAS,
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
    """Fill the rows of new replicas with the contents of the rank's first slot."""

    def without_replicas(
        before: Sequence[Tensor], after: list[Tensor], journey: Journey, group: ProcessGroup
    ) -> list[Tensor]:
        rank = group.rank()
        for old, new in zip(before, after, strict=True):
            for row, expert in list_arrivals(journey, rank):
                stays = any(
                    expert in journey.before[other] and expert in journey.after[other]
                    for other in range(group.size())
                    if other != rank
                )
                if stays:
                    new[row] = old[0]
        return after

    change_moves(patch, without_replicas)


FAULT = Fault(
    number="P07",
    title="a new replica never gets the weights of its expert",
    source="vllm-project/vllm #18343 (review of 2025-06-21)",
    mechanism="the plan of an exchange sends each expert to one new rank: the weights of its further replica stay",
    trigger="an exchange that adds replicas",
    case=make_exchange_case("p07", after=REPLICAS),
    expected=Expected(
        where=(At(name="*.moe*"),),
        causes=(Cause.DUPLICATE, Cause.REPLICAS, Cause.PERMUTATION, Cause.FORWARD),
    ),
    inject=inject,
)

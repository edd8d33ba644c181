"""After an exchange the slots still hold the values of the previous experts."""

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
    """Leave all rows in place, while names and routes change."""

    def stay(
        before: Sequence[Tensor], after: list[Tensor], journey: Journey, group: ProcessGroup
    ) -> list[Tensor]:
        return [tensor.clone() for tensor in before]

    change_moves(patch, stay)


FAULT = Fault(
    number="P05",
    title="slots keep the weights of the experts that were there before an exchange",
    source="vllm-project/vllm #55228, PrimeIntellect-ai/prime-rl #3583",
    mechanism="weights are written by the initial placement while tokens are routed by the current one",
    trigger="an exchange of experts, then weights by another placement",
    case=make_exchange_case("p05"),
    expected=Expected(where=(At(name="*.moe*"),), causes=(Cause.PERMUTATION, Cause.DUPLICATE, Cause.FORWARD)),
    inject=inject,
)

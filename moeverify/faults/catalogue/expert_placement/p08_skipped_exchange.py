"""A requested exchange never takes place: all values stay right, and the load stays unbalanced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.faults.catalogue.expert_placement.moves import make_exchange_case
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from moeverify.tools.placement.placement import Placement
    from moeverify.train.program import Program


def inject(patch: Patch) -> None:
    """Skip the exchange."""
    from moeverify.train.exchange import exchange_experts

    @patch.replace(exchange_experts)
    def nothing(program: Program, optimizer: Optimizer, placement: Placement) -> None:
        return None


FAULT = Fault(
    number="P08",
    title="an exchange of experts never takes place",
    source="no report known",
    mechanism="the policy that starts an exchange is asked before the first trace is there, and never again",
    trigger="an exchange of experts during training",
    case=make_exchange_case("p08"),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.LAYOUT,)),
    inject=inject,
)

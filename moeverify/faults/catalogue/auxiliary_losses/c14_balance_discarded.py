"""The balance loss is computed and logged, but the node that would carry its gradient is discarded."""

from __future__ import annotations

from moeverify.faults.catalogue.auxiliary_losses.balance import change_balance
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Detach the balance loss; its value is still reported."""
    change_balance(patch, lambda balance, batch: balance.detach())


FAULT = Fault(
    number="C14",
    title="gradient of the balance loss never flows",
    source="NVIDIA-NeMo/Automodel #1408, PR #1412",
    mechanism="what the autograd function that attaches the loss returns is discarded, so it is not in the graph",
    trigger="any layout",
    case=make_case("c14", dp_shard=2),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.TERM_SCALE,)),
    inject=inject,
)

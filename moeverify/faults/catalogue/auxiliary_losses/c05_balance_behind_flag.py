"""The balance loss is not added although its coefficient is positive, because a logging flag is off."""

from __future__ import annotations

from moeverify.faults.catalogue.auxiliary_losses.balance import change_balance
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Compute the router losses and drop the balance part."""
    change_balance(patch, lambda balance, batch: balance.new_zeros(()))


FAULT = Fault(
    number="C05",
    title="balance loss is skipped when router logits are not asked for",
    source="huggingface/transformers #44242, PR #44284",
    mechanism="the term is only added when a flag for the output is on, whatever its coefficient",
    trigger="any layout",
    case=make_case("c05", dp_shard=2),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.TERM_SCALE,)),
    inject=inject,
)

"""The reported training loss contains the balance loss."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Report the sum of cross entropy and balance loss as the cross entropy."""
    from torch import Tensor

    from moeverify.train.objective import Losses

    @patch.wrap(Losses.named)
    def add_balance(original: Original[dict[str, Tensor]], self: Losses) -> dict[str, Tensor]:
        values = original(self)
        return {**values, "lm": values["lm"] + values["balance"]}


FAULT = Fault(
    number="C17",
    title="reported training loss contains the balance loss",
    source="mlfoundations/open_lm #253, PR #255",
    mechanism="the loss that is logged is the one that is differentiated, balance part included",
    trigger="any layout, MoE",
    case=make_case("c17", dp_shard=2),
    expected=Expected(where=(At(term="lm"),), causes=(Cause.METRIC, Cause.PERMUTATION)),
    inject=inject,
    notes="upstream also logged the balance loss of one rank; this is the part that the fix calls the main issue",
)

"""The gradient of the sequence balance loss is divided by the number of rows in a micro-batch."""

from __future__ import annotations

from moeverify.faults.catalogue.auxiliary_losses.balance import change_balance, scale_gradient
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide the gradient of the balance loss by the rows of the micro-batch; its value stays right."""
    change_balance(patch, lambda balance, batch: scale_gradient(balance, 1 / len(batch.share.rows)))


FAULT = Fault(
    number="C09",
    title="gradient of the sequence balance loss depends on the micro-batch size",
    source="NVIDIA/Megatron-LM PR #5798 (e3fe5508c9)",
    mechanism="the tokens of one sequence are given where those of the micro-batch are wanted: 1/rows",
    trigger="more than one row in a micro-batch, sequence scope",
    case=make_case("c09", dp_shard=2, data={"batch": 12}),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.TERM_SCALE,)),
    inject=inject,
    notes="six rows a micro-batch, a number that is no degree of the layout",
)

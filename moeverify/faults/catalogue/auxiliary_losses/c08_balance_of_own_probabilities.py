"""The balance loss of the global batch averages local probabilities once more over data parallelism."""

from __future__ import annotations

from moeverify.faults.catalogue.auxiliary_losses.balance import change_balance
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

NUM_DATA_RANKS = 2


def inject(patch: Patch) -> None:
    """Divide the balance loss and its gradient by the number of data-parallel ranks."""
    change_balance(patch, lambda balance, batch: balance / NUM_DATA_RANKS)


FAULT = Fault(
    number="C08",
    title="the global balance loss is 1/dp of the right one",
    source="NVIDIA/Megatron-LM issue #3672, PR #3769",
    mechanism=(
        "local probabilities times global counts are divided by the square of the global tokens and then "
        "averaged over dp"
    ),
    trigger="data parallelism with a balance loss over the batch",
    case=make_case("c08", dp_shard=NUM_DATA_RANKS, moe={"balance_scope": "batch"}),
    expected=Expected(
        where=(
            At(term="balance"),
            At(name="balance"),
        ),
        causes=(Cause.TERM_SCALE,),
    ),
    inject=inject,
)

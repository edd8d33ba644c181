"""The gradient of the balance loss is not divided by the number of micro-batches."""

from __future__ import annotations

from moeverify.faults.catalogue.auxiliary_losses.balance import change_balance, scale_gradient
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

NUM_MICRO_BATCHES = 4


def inject(patch: Patch) -> None:
    """Multiply the gradient of the balance loss by the number of micro-batches; its value stays right."""
    change_balance(patch, lambda balance, batch: scale_gradient(balance, NUM_MICRO_BATCHES))


FAULT = Fault(
    number="C15",
    title="the balance loss counts once for each micro-batch",
    source="NVIDIA-NeMo/Automodel PR #3359 (640e01b0b)",
    mechanism="the auxiliary gradient is not normalized during gradient accumulation",
    trigger="gradient accumulation",
    case=make_case("c15", dp_shard=2, micro_batches=NUM_MICRO_BATCHES),
    expected=Expected(where=(At(term="balance"),), causes=(Cause.TERM_SCALE,)),
    inject=inject,
)

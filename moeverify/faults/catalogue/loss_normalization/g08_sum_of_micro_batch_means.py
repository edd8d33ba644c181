"""Each micro-batch is averaged over its own tokens, and the averages are summed."""

from __future__ import annotations

from moeverify.faults.catalogue.loss_normalization.losses import divide_by
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide by the tokens of this rank's micro-batch, times the number of averaged ranks."""
    divide_by(patch, lambda program, batch, normalizers: batch.valid.sum() * int(program.scale))


FAULT = Fault(
    number="G08",
    title="means of micro-batches are added up and not divided",
    source="verl-project/verl issues #5625, #2857; PR #3332",
    mechanism=(
        "the mean over the tokens of each micro-batch is not divided by their number before the backward pass"
    ),
    trigger="gradient accumulation over rows of unequal token counts",
    case=make_case("g08", preset="tiny-gpt", dp_shard=2, micro_batches=4),
    expected=Expected(where=(At(share="micro_batch"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

"""Each micro-batch is averaged over its own tokens, and the averages over the micro-batches."""

from __future__ import annotations

from moeverify.faults.catalogue.loss_normalization.losses import divide_by
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide a micro-batch by its own tokens on all ranks, times the number of micro-batches."""
    divide_by(
        patch,
        lambda program, batch, normalizers: (
            program.sums.over_batch(batch.valid.sum()) * program.num_micro_batches
        ),
    )


FAULT = Fault(
    number="G01",
    title="gradient accumulation averages the means of micro-batches",
    source="huggingface/transformers PR #34191, PR #34198",
    mechanism="the mean of micro-batch means is not the mean over all tokens where their counts differ",
    trigger="gradient accumulation over micro-batches of unequal token counts",
    case=make_case("g01", preset="tiny-gpt", dp_shard=2, micro_batches=2),
    expected=Expected(where=(At(share="micro_batch"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

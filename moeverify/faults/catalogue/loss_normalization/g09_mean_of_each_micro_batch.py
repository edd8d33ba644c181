"""A rank averages each micro-batch over its own tokens, so the loss depends on the micro-batch size."""

from __future__ import annotations

from moeverify.faults.catalogue.loss_normalization.losses import divide_by
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide by the tokens of this rank's micro-batch, times the number of micro-batches on all ranks."""
    divide_by(
        patch,
        lambda program, batch, normalizers: (
            batch.valid.sum() * program.num_micro_batches * int(program.scale)
        ),
    )


FAULT = Fault(
    number="G09",
    title="the loss depends on the micro-batch size",
    source="NVIDIA-NeMo/Speech #8343",
    mechanism="the masked loss is averaged over the tokens of one micro-batch on one rank, and those means averaged",
    trigger="more than one row in a micro-batch, rows of unequal token counts",
    case=make_case("g09", preset="tiny-gpt", dp_shard=2, micro_batches=2),
    expected=Expected(where=(At(share="micro_batch"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

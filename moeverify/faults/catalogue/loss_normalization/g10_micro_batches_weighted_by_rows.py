"""Micro-batches are weighted by their rows, although their losses are means over tokens."""

from __future__ import annotations

from moeverify.faults.catalogue.loss_normalization.losses import divide_by
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Weight the mean of a micro-batch by its share of the rows of the global batch."""
    divide_by(
        patch,
        lambda program, batch, normalizers: (
            batch.valid.sum() / (len(batch.share.rows) / normalizers.num_rows)
        ),
    )


FAULT = Fault(
    number="G10",
    title="micro-batches count by rows instead of tokens",
    source="mosaicml/composer PR #3273; mosaicml/llm-foundry PR #1595",
    mechanism="the mean loss of a micro-batch is weighted by its number of samples; padding makes tokens unequal",
    trigger="gradient accumulation over padded rows",
    case=make_case("g10", preset="tiny-gpt", dp_replicate=2, data_parallel="ddp", micro_batches=4),
    expected=Expected(where=(At(share="micro_batch"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

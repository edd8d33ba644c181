"""Each data-parallel rank divides its loss by its own number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.train import loop
from moeverify.train.data import Batch
from moeverify.train.objective import Normalizers, Sums


def inject() -> None:
    """Count the tokens of this rank only, times the number of ranks that are averaged."""

    def count_valid(batches: Sequence[Batch], sums: Sums, num_rows: int) -> Normalizers:
        local = torch.stack([batch.valid.sum() for batch in batches]).sum()
        return Normalizers(local * sums.over_batch(torch.ones_like(local)), num_rows)

    loop.count_valid = count_valid


FAULT = Fault(
    number="G02",
    title="each data-parallel rank normalizes by its own tokens",
    source="huggingface/transformers PR #34373",
    mechanism="the tokens of a step are counted on each device alone, and the means of devices are averaged",
    trigger="data parallelism over rows of unequal token counts",
    case=make_case("g02", preset="tiny-gpt", dp_replicate=2, data_parallel="ddp"),
    expected=Expected(where=(At(share="data_rank"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

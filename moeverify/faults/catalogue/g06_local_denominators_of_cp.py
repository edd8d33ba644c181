"""Each rank of data and context parallelism divides its loss by its own number of tokens."""

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
    number="G06",
    title="each rank of dp and cp normalizes by its own tokens",
    source="PrimeIntellect-ai/prime-rl PR #2562 (1d9ca9255)",
    mechanism="the loss scale is the token count of one rank instead of that of the dp and cp ranks together",
    trigger="data and context parallelism over unequal token counts",
    case=make_case("g06", preset="tiny-gpt", dp_shard=2, cp=2),
    expected=Expected(where=(At(share="context_rank"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

"""Each data-parallel rank divides its loss by its own number of tokens."""

from __future__ import annotations

from moeverify.faults.catalogue.loss_normalization.losses import count_own_tokens
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Count the tokens of this rank only, times the number of averaged ranks."""
    count_own_tokens(patch)


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

"""Each data- and context-parallel rank divides its loss by its own number of tokens."""

from __future__ import annotations

from moeverify.faults.catalogue.loss_normalization.losses import count_own_tokens
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Count the tokens of this rank only, times the number of averaged ranks: G02 in another layout."""
    count_own_tokens(patch)


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

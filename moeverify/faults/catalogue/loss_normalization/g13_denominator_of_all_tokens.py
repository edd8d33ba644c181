"""Tokens that are masked out of the loss still count in its denominator."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Divide by all tokens, including masked ones."""
    import torch

    from moeverify.train.data import Batch
    from moeverify.train.objective import Normalizers, Sums, count_valid

    @patch.replace(count_valid)
    def count_all(batches: Sequence[Batch], sums: Sums, num_rows: int) -> Normalizers:
        local = torch.tensor(sum(batch.valid.numel() for batch in batches), device=batches[0].valid.device)
        return Normalizers(sums.over_batch(local), num_rows)


FAULT = Fault(
    number="G13",
    title="masked tokens stay in the denominator of the loss",
    source="pytorch/torchtitan PR #4174",
    mechanism="tokens are removed from the mask of the numerator, the denominator is counted before that",
    trigger="any, with tokens that do not count",
    case=make_case("g13", preset="tiny-gpt", dp_shard=2),
    expected=Expected(where=(At(stage=Stage.BACKWARD),), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
    notes="upstream removed non-finite tokens of a policy loss; here the removed tokens are padding",
)

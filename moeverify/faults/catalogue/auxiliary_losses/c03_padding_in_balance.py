"""Padding tokens count in both factors of the balance loss."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Sum the balance loss's probabilities over all tokens; the z loss and the router's counts stay right."""
    from torch import Tensor

    from moeverify.model.router import RouterStats, summarize

    @patch.wrap(summarize)
    def count_all(
        original: Original[RouterStats], logits: Tensor, probabilities: Tensor, ids: Tensor, valid: Tensor
    ) -> RouterStats:
        right = original(logits, probabilities, ids, valid)
        every = original(logits, probabilities, ids, valid.new_ones(valid.shape))
        return right._replace(probability_sum=every.probability_sum)


FAULT = Fault(
    number="C03",
    title="padding counts in the balance loss",
    source="huggingface/transformers issue #28505, PR #28517",
    mechanism="the mask is not given to the balance loss",
    trigger="a padded batch",
    case=make_case("c03", dp_shard=2),
    expected=Expected(
        where=(
            At(term="balance"),
            At(name="*.moe.router*"),
        ),
        causes=(Cause.PADDING,),
    ),
    inject=inject,
    notes="the probabilities alone are summed over padding: counts would move the selection bias too",
)

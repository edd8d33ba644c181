"""The balance loss applies a softmax to values that are already probabilities."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Apply a second softmax to the probabilities that the balance loss sums."""
    from torch import Tensor

    from moeverify.model.router import RouterStats, summarize

    @patch.wrap(summarize)
    def apply_softmax_again(
        original: Original[RouterStats], logits: Tensor, probabilities: Tensor, ids: Tensor, valid: Tensor
    ) -> RouterStats:
        return original(logits, probabilities.softmax(dim=-1), ids, valid)


FAULT = Fault(
    number="C04",
    title="double softmax in the balance loss",
    source="huggingface/transformers #45120, PR #45111",
    mechanism="the router returns probabilities under the name of logits, and the loss takes their softmax",
    trigger="any layout, a softmax router",
    case=make_case("c04", dp_shard=2, moe={"score": "softmax"}),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.FORWARD,)),
    inject=inject,
)

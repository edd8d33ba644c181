"""The balance loss averages the router's probabilities over the experts instead of over the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Replace each expert's probability by the mean over experts, a constant: probabilities sum to 1."""
    from torch import Tensor

    from moeverify.cases.schema import MoE
    from moeverify.model.router import RouterStats
    from moeverify.train.data import Batch
    from moeverify.train.objective import Normalizers, Sums, router_losses

    def average(stats: RouterStats) -> RouterStats:
        means = stats.probability_sum.mean(dim=-1, keepdim=True).expand_as(stats.probability_sum)
        return stats._replace(probability_sum=means)

    @patch.wrap(router_losses)
    def average_over_experts(
        original: Original[tuple[Tensor, Tensor]],
        spec: MoE,
        routers: Sequence[RouterStats],
        batch: Batch,
        normalizers: Normalizers,
        sums: Sums,
    ) -> tuple[Tensor, Tensor]:
        return original(spec, [average(stats) for stats in routers], batch, normalizers, sums)


FAULT = Fault(
    number="C01",
    title="balance loss does not respond to imbalance",
    source="huggingface/transformers #28255, PR #28256",
    mechanism="the mean of the router's probabilities is taken over the expert axis, so the loss is constant",
    trigger="any layout",
    case=make_case("c01", dp_shard=2),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.TERM_SCALE,)),
    inject=inject,
)

"""The balance loss averages the router's probabilities over the experts instead of over the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeverify.case.schema import MoE
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.router import RouterStats
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.train import forward
from moeverify.train.data import Batch
from moeverify.train.objective import Normalizers, Sums, router_losses


def inject() -> None:
    """Give every expert the mean over the experts: probabilities sum to one, so it is a constant."""
    forward.router_losses = _losses


def _losses(
    spec: MoE, routers: Sequence[RouterStats], batch: Batch, normalizers: Normalizers, sums: Sums
) -> tuple[Tensor, Tensor]:
    return router_losses(spec, [_average(stats) for stats in routers], batch, normalizers, sums)


def _average(stats: RouterStats) -> RouterStats:
    means = stats.probability_sum.mean(dim=-1, keepdim=True).expand_as(stats.probability_sum)
    return stats._replace(probability_sum=means)


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

"""The balance loss averages the router's probabilities over the experts instead of over the tokens."""

from __future__ import annotations

from torch import Tensor

from moeverify.case.schema import MoE
from moeverify.diagnose.cause import Cause
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.router import RouterStats
from moeverify.train import objective
from moeverify.train.data import Batch
from moeverify.train.objective import Normalizers, Sums


def inject() -> None:
    """Give every expert the mean over the experts: probabilities sum to one, so it is a constant."""

    def balance(
        spec: MoE, stats: RouterStats, batch: Batch, normalizers: Normalizers, sums: Sums
    ) -> Tensor:
        means = stats.probability_sum.mean(dim=-1, keepdim=True).expand_as(stats.probability_sum)
        return original(spec, stats._replace(probability_sum=means), batch, normalizers, sums)

    original = objective._balance
    objective._balance = balance


FAULT = Fault(
    number="C01",
    title="balance loss does not respond to imbalance",
    source="huggingface/transformers #28255, PR #28256",
    mechanism="the mean of the router's probabilities is taken over the expert axis, so the loss is constant",
    trigger="any layout",
    case=make_case("c01", dp_shard=2),
    expected=Expected(where=r"balance|router", causes=(Cause.TERM_SCALE,)),
    inject=inject,
)

"""Routing choices, weights and counts, right and with bugs, against a recomputation in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.model import router as routers
from moeverify.model.router import Router
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.verification.checks.base import CheckOutcome
from moeverify.verification.checks.router import RouterWatch, choose_experts, judge_routers

PRECISIONS = ("float64", "float32", "bfloat16", "mixed")
SGD = {"name": "sgd", "lr": 0.1}
SOFTMAX = {"num_experts": 8, "top_k": 2, "expert_hidden": 8}
SIGMOID = {
    **SOFTMAX,
    "score": "sigmoid",
    "num_groups": 4,
    "top_groups": 2,
    "selection_bias_rate": 0.01,
    "route_scale": 2.5,
}
Judge = Callable[..., CheckOutcome]


@pytest.fixture
def judge(run_ranks: Callable, train_alone: Callable, make_one_device_case: Callable) -> Judge:
    """Return a function that trains on one device and judges its routers."""
    shown = run_ranks({0: {}}).shown()

    def do(moe: dict[str, Any], precision: str) -> CheckOutcome:
        case = make_one_device_case(SGD, precision, moe)
        return judge_routers(shown, [train_alone(case, lambda program: RouterWatch(program.model))])

    return do


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("moe", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid groups"])
def test_sound_routers_pass(judge: Judge, moe: dict[str, Any], precision: str) -> None:
    outcome = judge(moe, precision)
    assert outcome.findings == ()
    assert outcome.result.tensors > 0


def quantities(outcome: CheckOutcome) -> set[str]:
    for finding in outcome.findings:
        assert finding.code == (Cause.FORWARD if finding.kind == "router_weights" else Cause.ROUTING)
    return {finding.kind for finding in outcome.findings}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("moe", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid groups"])
def test_a_router_that_picks_from_bfloat16_scores_is_found(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, moe: dict[str, Any], precision: str
) -> None:
    choose = Router._choose

    def choose_narrow(self: Router, scores: Tensor) -> tuple[Tensor, Tensor]:
        return choose(self, scores.to(torch.bfloat16).to(scores.dtype))

    monkeypatch.setattr(Router, "_choose", choose_narrow)
    many = {**moe, "num_experts": 64}  # scores are so close that two are equal in bfloat16
    assert quantities(judge(many, precision)) == {Kind.ROUTER_IDS}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_of_bfloat16_products_are_found(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    compute = Router.compute_logits

    def compute_narrow(self: Router, x: Tensor) -> Tensor:
        logits = compute(self, x)
        return logits + (logits.to(torch.bfloat16) - logits).detach()

    monkeypatch.setattr(Router, "compute_logits", compute_narrow)
    found = quantities(judge({**SOFTMAX, "num_experts": 64}, precision))
    assert found >= {Kind.ROUTER_IDS}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_are_not_scaled_are_found(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    weigh = Router.weigh
    monkeypatch.setattr(Router, "weigh", lambda self, scores: weigh(self, scores) / 1.02)
    assert quantities(judge(SIGMOID, precision)) == {Kind.ROUTER_WEIGHTS}


def test_counts_of_other_tokens_are_found(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    summarize = routers.summarize

    def count_twice(*arguments: Any) -> Any:
        stats = summarize(*arguments)
        return stats._replace(counts=2 * stats.counts)

    monkeypatch.setattr(routers, "summarize", count_twice)
    assert quantities(judge(SOFTMAX, "bfloat16")) == {Kind.ROUTER_COUNTS}


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
def test_the_choice_is_that_of_the_reference_model(make_one_device_case: Callable, group_score: str) -> None:
    moe = {**SIGMOID, "num_experts": 16, "group_score": group_score}
    spec = make_one_device_case(SGD, "float64", moe).recipe.model.moe
    module = Router(4, spec, {"dtype": torch.float64, "device": torch.device("cpu")})
    scores = torch.rand(200, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids, margin = module._choose(scores)
    chosen, room = choose_experts(spec, scores)
    assert torch.equal(torch.zeros_like(chosen).scatter(-1, ids, True), chosen)
    assert (room <= margin).all(), "a group's score of two experts may be off by twice as much"

"""Gradients of routers, right and with bugs, against those of their losses and their own inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.model import router as routers
from moeverify.model.router import RouterStats
from moeverify.results.cause import Cause
from moeverify.results.facts import RouterGradientFacts
from moeverify.train import forward, objective
from moeverify.verification.checks import wide_parts
from moeverify.verification.checks.base import CheckOutcome
from moeverify.verification.checks.router_backward import RouterFit
from moeverify.verification.checks.router_gradient import (
    Reports,
    RouterGradientWatch,
    RouterStep,
    judge_gradients,
)

PRECISIONS = ("float64", "float32", "bfloat16")
SGD = {"name": "sgd", "lr": 0.1}
SOFTMAX = {"num_experts": 8, "top_k": 2, "expert_hidden": 8, "balance_coef": 0.01, "z_coef": 0.001}
SIGMOID = {**SOFTMAX, "score": "sigmoid", "num_groups": 4, "top_groups": 2, "balance_scope": "batch"}
Judge = Callable[..., CheckOutcome]


@pytest.fixture
def judge(run_ranks: Callable, train_alone: Callable, make_one_device_case: Callable) -> Judge:
    """Return a function that trains on one device and judges the gradients of its routers."""

    def do(moe: Mapping[str, Any], precision: str) -> CheckOutcome:
        case = make_one_device_case(SGD, precision, moe)
        padded = case.recipe.data.model_copy(update={"min_valid": 0.5})
        case = case.model_copy(update={"recipe": case.recipe.model_copy(update={"data": padded})})
        by_row = "balance_scope" not in moe
        report: Reports = train_alone(
            case, lambda program: RouterGradientWatch(program.model, by_row=by_row, scale=program.scale)
        )
        return judge_gradients(run_ranks({0: {}}).shown(case), [report])

    return do


def facts_of(outcome: CheckOutcome) -> list[RouterGradientFacts]:
    found = [finding.facts for finding in outcome.findings if finding.step == 0]
    assert all(isinstance(each, RouterGradientFacts) for each in found)
    return found  # type: ignore[return-value]


def wrap_sums(monkeypatch: pytest.MonkeyPatch, change: Callable[..., RouterStats]) -> None:
    """Pass the router's sums for its losses, and their summands, through `change`."""
    original = routers.summarize

    def summarize(logits: Tensor, probabilities: Tensor, ids: Tensor, valid: Tensor) -> RouterStats:
        return change(original, logits, probabilities, ids, valid)

    monkeypatch.setattr(routers, "summarize", summarize)


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    return value * factor + value.detach() * (1.0 - factor)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("moe", [SOFTMAX, SIGMOID], ids=["softmax by row", "sigmoid by batch"])
def test_sound_gradients_pass_and_every_part_is_judged(judge: Judge, moe: Any, precision: str) -> None:
    outcome = judge(moe, precision)
    assert outcome.findings == ()
    assert outcome.result.worst is not None
    assert outcome.result.worst.error > 0.0
    assert outcome.result.tensors > 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("term", ["balance", "z"])
def test_the_gradient_of_a_loss_that_is_off_by_a_thousandth_is_found_in_every_precision(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, term: str, precision: str
) -> None:
    original = objective.router_losses

    def scaled(*arguments: Any) -> tuple[Tensor, Tensor]:
        losses = dict(zip(("balance", "z"), original(*arguments), strict=True))
        losses[term] = scale_gradient(losses[term], 1.001)
        return losses["balance"], losses["z"]

    monkeypatch.setattr(forward, "router_losses", scaled)
    (facts,) = facts_of(judge(SOFTMAX, precision))
    assert (facts.term, facts.in_router) == (term, False)
    assert facts.factors[0] == pytest.approx(1.001, rel=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_a_router_makes_of_the_gradient_of_a_loss_is_measured(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    def change(original: Any, logits: Tensor, probabilities: Tensor, *rest: Tensor) -> RouterStats:
        return original(logits, scale_gradient(probabilities, 1.5), *rest)

    wrap_sums(monkeypatch, change)
    (facts,) = facts_of(judge(SOFTMAX, precision))
    assert (facts.term, facts.in_router) == ("balance", True)
    assert facts.factors[0] == pytest.approx(1.5, rel=0.1)


def test_long_passes_are_computed_in_parts(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_parts, "_MOST_ELEMENTS", 100)
    assert judge(SOFTMAX, "float64").findings == ()


def test_padding_that_takes_part_is_told_from_a_factor(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(original: Any, *arguments: Tensor) -> RouterStats:
        everything = torch.ones_like(arguments[-1])
        return original(*arguments)._replace(z_sum=original(*arguments[:-1], everything).z_sum)

    wrap_sums(monkeypatch, change)
    outcome = judge(SOFTMAX, "float64")
    assert [each.term for each in facts_of(outcome)] == ["z padding"]
    assert {finding.code for finding in outcome.findings} == {Cause.PADDING}


def test_a_loss_without_a_gradient_counts_zero_times(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    original = objective.router_losses

    def detach(*arguments: Any) -> tuple[Tensor, Tensor]:
        balance, z = original(*arguments)
        return balance.detach(), z

    monkeypatch.setattr(forward, "router_losses", detach)
    (facts,) = facts_of(judge(SOFTMAX, "bfloat16"))
    assert (facts.term, facts.factors) == ("balance", {0: 0.0})


def test_a_gradient_that_is_made_otherwise_has_no_factor(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = routers.Router.weigh

    def weigh(self: routers.Router, chosen: Tensor) -> Tensor:
        weights = original(self, chosen)
        return weights.detach() + 0.5 * (weights.square() - weights.square().detach())

    monkeypatch.setattr(routers.Router, "weigh", weigh)
    (facts,) = facts_of(judge(SOFTMAX, "float64"))
    assert (facts.term, facts.in_router, facts.factors) == ("combine", True, {0: None})


@pytest.fixture
def padded_case(make_one_device_case: Callable) -> Any:
    """Return a case, for reports that are written by hand."""
    return make_one_device_case(SGD, "float32", SOFTMAX)


def test_a_rank_that_has_padding_alone_is_allowed_nothing_and_has_no_error(
    run_ranks: Callable, padded_case: Any
) -> None:
    fit = RouterFit((None, None, None, (0.0, 0.0), (0.0, 0.0)), ratio=0.0, is_whole=True)
    outcome = judge_gradients(
        run_ranks({0: {}}).shown(padded_case), [{0: {"router": RouterStep(fits=[fit])}}]
    )
    assert outcome.findings == ()
    assert outcome.result.tensors == 3


def test_ranks_that_weigh_their_shares_differently_are_told_from_a_factor(
    run_ranks: Callable, padded_case: Any
) -> None:
    reports = [
        {
            0: {
                name: RouterStep(fits=[RouterFit(((1.0, 1e-6), (factor, 1e-3), None, None, None), 9.0, True)])
                for name in ("layers.0.moe.router", "layers.1.moe.router")
            }
        }
        for factor in (1.5, 3.0)
    ]
    (finding,) = judge_gradients(run_ranks({0: {}, 1: {}}).shown(padded_case), reports).findings
    assert (finding.code, finding.ranks) == (Cause.SHARE_WEIGHTS, (0, 1))
    # One router confirms nothing, and two that differ by more than three deviations contradict it.
    single = [{0: {"layers.0.moe.router": report[0]["layers.0.moe.router"]}} for report in reports]
    other = RouterStep(fits=[RouterFit(((1.0, 1e-6), (1.51, 1e-3), None, None, None), 9.0, True)])
    contradicted = [{0: reports[0][0] | {"layers.1.moe.router": other}}, reports[1]]
    for unknown in (single, contradicted):
        (finding,) = judge_gradients(run_ranks({0: {}, 1: {}}).shown(padded_case), unknown).findings
        assert (finding.code, set(finding.facts.factors.values())) == (Cause.FORWARD, {None})
    alike = [reports[0], reports[0]]
    (finding,) = judge_gradients(run_ranks({0: {}, 1: {}}).shown(padded_case), alike).findings
    assert finding.code == Cause.TERM_SCALE
    vague = RouterStep(fits=[RouterFit(((1.0, 1e-6), (0.075, 2e-3), None, None, None), 9.0, True)])
    reports = [{0: {"layers.0.moe.router": vague, "layers.1.moe.router": vague}}] * 2
    (finding,) = judge_gradients(run_ranks({0: {}, 1: {}}).shown(padded_case), reports).findings
    assert (finding.code, set(finding.facts.factors.values())) == (Cause.FORWARD, {None})

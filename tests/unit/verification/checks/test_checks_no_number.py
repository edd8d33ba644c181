"""A NaN that follows from a NaN in the inputs: recomputation checks report no error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.model.attention import Attention
from moeverify.model.router import Router
from moeverify.train import loop
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.clip import GradientWatch, judge_norms
from moeverify.verification.checks.objective import ObjectiveWatch, judge_losses
from moeverify.verification.checks.optimizer_step import OptimizerWatch, judge_rows
from moeverify.verification.checks.router import RouterWatch, judge_routers
from moeverify.verification.checks.router_gradient import RouterGradientWatch, judge_gradients

MOE = {"num_experts": 8, "top_k": 2, "expert_hidden": 8, "balance_coef": 0.01, "z_coef": 0.001}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5}
Judge = Callable[[str], dict[str, Any]]


@pytest.fixture
def judge(run_ranks: Callable, train_alone: Callable, make_one_device_case: Callable) -> Judge:
    """Return a function that trains on one device and returns the findings of each check in step 0."""

    def do(precision: str) -> dict[str, Any]:
        case = make_one_device_case(SGD, precision, MOE)
        shown = run_ranks({0: {}}).shown(case)
        by_check: dict[str, tuple[Callable, Callable]] = {
            "router": (lambda program: RouterWatch(program.model), judge_routers),
            "router gradient": (
                lambda program: RouterGradientWatch(program.model, by_row=True, scale=program.scale),
                judge_gradients,
            ),
            "objective": (
                lambda program: ObjectiveWatch(program, by_row=True, is_whole=True),
                judge_losses,
            ),
            "clip": (lambda program: GradientWatch(norms_are_wide=True), judge_norms),
            "optimizer step": (lambda program: OptimizerWatch(case.recipe, program), judge_rows),
        }
        found = {}
        for name, (watch, judge_reports) in by_check.items():
            outcome = judge_reports(shown, [train_alone(case, watch)])
            found[name] = {each.tensor for each in outcome.findings if each.step == 0}
        return {name: tensors for name, tensors in found.items() if tensors}

    return do


def spoil(value: Tensor, *, at: Any = ...) -> Tensor:
    """Return the value with NaN at some places, which the gradient gets too."""
    mask = torch.zeros_like(value, dtype=torch.bool)
    mask[at] = True
    return value * torch.where(mask, torch.nan, 1.0).to(value.dtype)


@pytest.mark.parametrize("at", [..., (0, 0)], ids=["all tokens", "one token"])
@pytest.mark.parametrize("precision", ["float64", "bfloat16", "mixed"])
def test_nothing_is_said_of_what_follows_from_an_attention_that_puts_out_no_numbers(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, precision: str, at: Any
) -> None:
    forward = Attention.forward
    monkeypatch.setattr(
        Attention, "forward", lambda self, x, positions: spoil(forward(self, x, positions), at=at)
    )
    assert judge(precision) == {}


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_a_router_that_weighs_by_no_numbers_is_found(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    weigh = Router.weigh
    monkeypatch.setattr(Router, "weigh", lambda self, scores: spoil(weigh(self, scores), at=(0, 0)))
    assert judge(precision)["router"] == {"layers.0.moe.router"}, "that of layer 1 has no numbers there"


def test_a_norm_that_is_no_number_over_gradients_that_are_is_found(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = TrainingProgram.measure_norm
    monkeypatch.setattr(TrainingProgram, "measure_norm", lambda self: measure(self) * torch.nan)
    found = judge("float32")
    assert found["clip"] == {"total"}, "the coefficient follows from the norm"


def test_a_loss_that_is_divided_by_nothing_is_found(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    count = loop.count_valid

    def count_none(*arguments: Any) -> Any:
        right = count(*arguments)
        return type(right)(0 * right.num_valid, right.num_rows)

    monkeypatch.setattr(loop, "count_valid", count_none)
    assert {"lm", "z"} <= judge("float32")["objective"]

"""Moments of real optimizers with other betas, or with dampening: one number explains all of their coefficients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import optim

from moeverify.checks.base import Outcome, Shown
from moeverify.checks.optimizer_step import OptimizerWatch, judge_rows
from moeverify.checks.recomputed_step import Row, fit_rate
from moeverify.diagnose.recomputed import join_alike
from moeverify.report.words.check import describe_facts
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.train.engine import PlainEngine
from moeverify.train.schedule import list_rates

ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.2, "betas": [0.9, 0.99]}
ADAM = {**ADAMW, "name": "adam"}
SGD = {"name": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.2}


@pytest.fixture
def judge(
    run_ranks: Callable, train_alone: Callable, make_one_device_case: Callable
) -> Callable[..., Outcome]:
    """Return a function that trains on one device and judges its steps."""
    shown: Shown = run_ranks({0: {}}).shown()

    def do(optimizer: dict[str, Any], precision: str) -> Outcome:
        case = make_one_device_case(optimizer, precision)
        rows = train_alone(case, lambda program: OptimizerWatch(case.recipe, program))
        return judge_rows(
            replace(shown, case=case), [rows], list_rates(case.recipe.optimizer, case.recipe.steps)
        )

    return do


def change(monkeypatch: pytest.MonkeyPatch, make: Callable[[optim.Optimizer], None]) -> None:
    """Change the optimizer that the recipe makes."""
    begin = PlainEngine.begin

    def begin_otherwise(self: PlainEngine, *arguments: Any) -> optim.Optimizer:
        built = begin(self, *arguments)
        make(built)
        return built

    monkeypatch.setattr(PlainEngine, "begin", begin_otherwise)


def set_betas(monkeypatch: pytest.MonkeyPatch, betas: Sequence[float]) -> None:
    def take(optimizer: optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["betas"] = tuple(betas)

    change(monkeypatch, take)


def say(outcome: Outcome) -> dict[str, list[str]]:
    """Return what is said of each result, by the findings that follow from no other one."""
    heads: list[Finding] = [finding for finding in join_alike(outcome.findings) if not finding.follows]
    found: dict[str, list[str]] = {}
    for each in heads:
        quantity = "update" if each.kind == Kind.UPDATE else each.tensor.rpartition(".")[2]
        found.setdefault(quantity, []).append(describe_facts(each.facts, each).cause)
    return found


def name(moment: str, used: float, right: float, means: str) -> str:
    return (
        f"the optimizer computes {moment} otherwise: with a beta of {used:.5g} in place of {right:.5g}{means}"
    )


@pytest.mark.parametrize("precision", ["float64", "float32", "mixed"])
@pytest.mark.parametrize("optimizer", [ADAMW, ADAM], ids=["adamw", "adam"])
@pytest.mark.parametrize(
    ("betas", "means"),
    [
        ((0.99, 0.9), (", which is the other beta",) * 2),
        ((0.8984375, 0.98828125), (", which is that rounded to bfloat16",) * 2),
        ((0.1, 0.99), (", which is 1 - beta", None)),
        ((0.9, 0.7), (None, "")),
    ],
)
def test_a_beta_that_is_another_one_is_named(
    judge: Callable,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: dict[str, Any],
    precision: str,
    betas: tuple[float, float],
    means: tuple[str | None, str | None],
) -> None:
    set_betas(monkeypatch, betas)
    said = say(judge(optimizer, precision))
    rights = zip(("exp_avg", "exp_avg_sq"), betas, ADAMW["betas"], means, strict=True)
    for moment, used, right, what in rights:
        if what:
            assert name(moment, used, right, what) in said.pop(moment)
        elif what is None:
            assert moment not in said
    assert "which is that" not in str(said)


@pytest.mark.parametrize("precision", ["float64", "mixed", "bfloat16"])
def test_half_a_gradient_is_no_other_beta(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    step = PlainEngine.step

    def step_with_half(self: PlainEngine) -> None:
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.mul_(0.5)
        step(self)

    monkeypatch.setattr(PlainEngine, "step", step_with_half)
    said = str(say(judge({**ADAMW, "betas": [0.9, 0.95]}, precision)))
    assert "gradient counts 0.5" in said or "gradient counts 0.49" in said
    assert "beta" not in said


@pytest.mark.parametrize("precision", ["float64", "mixed", "bfloat16"])
@pytest.mark.parametrize("momentum", [0.9, 0.75])
def test_dampening_is_one_factor_of_gradient_and_decay(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str, momentum: float
) -> None:
    def dampen(optimizer: optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["dampening"] = group["momentum"]
            for weight in group["params"]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    change(monkeypatch, dampen)
    said = say(judge({**SGD, "momentum": momentum}, precision))
    assert list(said) == ["momentum_buffer"]
    assert len(said["momentum_buffer"]) == 1
    assert "which is 1 - momentum, as with dampening" in said["momentum_buffer"][0]


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("times", [0.5, 3.7])
def test_the_square_follows_where_the_decay_in_the_gradient_is_a_multiple(
    judge: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, precision: str, times: float
) -> None:
    def decay(optimizer: optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] *= times

    change(monkeypatch, decay)
    outcome = judge(ADAM, precision)
    wanted = f"the optimizer computes exp_avg otherwise: weight decay counts {times:g} times"
    assert say(outcome) == {"exp_avg": [wanted]}
    squares = [each.facts for each in outcome.findings if each.tensor.endswith("exp_avg_sq")]
    assert squares
    for facts in squares:
        (form,) = facts.variants
        assert (form.changes, form.number) == (("decay-times",), pytest.approx(times, rel=1e-3))


def test_what_is_many_times_as_large_is_rounded_as_often() -> None:
    terms = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = 1e-4 * torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0) * terms
    result = 1000.0 * (terms + noise)
    values = torch.stack([terms, result])
    row = Row(
        key=(0, Kind.UPDATE, "w"),
        region="",
        terms=(("step", 1.0),),
        worst=9.0,
        index=(0,),
        expected=1.0,
        actual=1000.0,
        allowed=1e-7,
        num_elements=64,
        sum_allowed2=1.1 * float(noise.square().sum()),
        sum_expected2=float(terms.square().sum()),
        sum_spread2=0.0,
        sum_stored2=0.0,
        gram=tuple(map(tuple, (values @ values.T).tolist())),
        clip=None,
    )
    found = fit_rate(row, 1000.0)
    assert found is not None
    assert found[0].found == 1000.0
    assert fit_rate(row, 1001.0) is None

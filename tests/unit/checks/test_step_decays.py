"""Adam with a decay of another kind: told by formulas that give the values, and never by multiples that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.checks.base import Outcome
from moeverify.diagnose.recomputed import join_alike
from moeverify.report.words.check import describe_facts
from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.train.engine import PlainEngine

ADAM = {
    "name": "adam",
    "lr": 0.01,
    "weight_decay": 0.3,
    "clip_norm": 0.002,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
}
SGD = {"name": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.3, "clip_norm": 0.002}
Decay = Callable[[Mapping[str, Any], Tensor, int], Tensor]


@pytest.fixture
def judge(judge_steps: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Return a function that trains on one device with Adam, and judges its steps."""
    return partial(judge_steps, ADAM)


def step_with(decay: Decay) -> Callable[[PlainEngine], None]:
    """Return Adam's step with what `decay` makes of the gradient of a weight, by its number in its group."""

    def step(engine: PlainEngine) -> None:
        optimizer = engine.optimizer
        optimizer._opt_called = True  # which its schedule asks for
        with torch.no_grad():
            for group in optimizer.param_groups:
                for number, weight in zip(count(1), group["params"]):
                    gradient = decay(group, weight, number)
                    state = optimizer.state[weight]
                    if not state:
                        zeros = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                        state.update(step=torch.zeros(()), **zeros)
                    state["step"] += 1
                    take(group, state, weight, gradient)

    return step


def take(group: Mapping[str, Any], state: dict[str, Tensor], weight: Tensor, gradient: Tensor) -> None:
    (first, second), steps = group["betas"], int(state["step"])
    state["exp_avg"].lerp_(gradient, 1.0 - first)
    state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
    root = (state["exp_avg_sq"].sqrt() / (1.0 - second**steps) ** 0.5).add_(group["eps"])
    weight.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1.0 - first**steps))


def at_weight(group: Mapping[str, Any], weight: Tensor, number: int) -> Tensor:
    weight.mul_(1.0 - group["lr"] * group["weight_decay"])
    return weight.grad


def nowhere(group: Mapping[str, Any], weight: Tensor, number: int) -> Tensor:
    return weight.grad


def by_number(group: Mapping[str, Any], weight: Tensor, number: int) -> Tensor:
    return weight.grad + group["weight_decay"] * number if group["weight_decay"] else weight.grad


def by_number_too(group: Mapping[str, Any], weight: Tensor, number: int) -> Tensor:
    return by_number(group, weight, number) + group["weight_decay"] * weight


def by_sign(group: Mapping[str, Any], weight: Tensor, number: int) -> Tensor:
    return weight.grad + group["weight_decay"] * weight.sign()


def by_square(group: Mapping[str, Any], weight: Tensor, number: int) -> Tensor:
    return weight.grad + group["weight_decay"] * weight.abs() * weight


def say(outcome: Outcome) -> list[str]:
    """Return what is said of what follows from nothing else."""
    heads: list[Finding] = [each for each in join_alike(outcome.findings) if not each.follows]
    return [describe_facts(each.facts, each).cause.partition("otherwise: ")[2] or "unknown" for each in heads]


BY_ITSELF = (
    "weight decay is left out of the gradient and "
    "weight decay is taken from the weight itself, as with decoupled decay"
)


@pytest.mark.parametrize("precision", ["float64", "float32", "mixed"])
@pytest.mark.parametrize(
    ("decay", "wanted"),
    [
        (at_weight, BY_ITSELF),
        (nowhere, "weight decay is left out of the gradient"),
        (by_number, "a constant is added to the gradient in the place of weight decay"),
        (by_number_too, "a constant is added to the gradient, "),
    ],
)
def test_a_decay_of_another_kind_is_one_cause(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, decay: Decay, wanted: str, precision: str
) -> None:
    monkeypatch.setattr(PlainEngine, "step", step_with(decay))
    said = say(judge(precision))
    assert len(said) == 1, said
    assert said[0].startswith(wanted)
    assert decay is not nowhere or said[0] == wanted


def test_in_16_bits_a_decay_is_left_out_of_both_moments(
    judge: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainEngine, "step", step_with(at_weight))
    said = say(judge("bfloat16"))
    assert said[0].startswith("weight decay is left out of the gradient"), said
    assert "counts" not in str(said)
    assert "squared gradient" not in str(said)


@pytest.mark.parametrize("precision", ["float64", "float32", "mixed", "bfloat16"])
@pytest.mark.parametrize("decay", [by_number, by_number_too, by_sign, by_square])
def test_no_multiples_are_told_that_do_not_give_the_values(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, decay: Decay, precision: str
) -> None:
    monkeypatch.setattr(PlainEngine, "step", step_with(decay))
    outcome = judge(precision)
    assert any(each.kind == Kind.OPTIMIZER_STATE for each in outcome.findings)
    said = str(say(outcome))
    assert "counts" not in said
    assert "left out" not in said


def test_sgd_that_decays_by_itself_is_one_cause(
    judge_steps: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = PlainEngine.step

    def decay_first(self: PlainEngine) -> None:
        for group in self.optimizer.param_groups:
            decay, group["weight_decay"] = group["weight_decay"], 0.0
            for weight in group["params"]:
                weight.data.mul_(1.0 - group["lr"] * decay)
            group["decay"] = group.get("decay", decay)
        step(self)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = group["decay"]

    monkeypatch.setattr(PlainEngine, "step", decay_first)
    assert say(judge_steps(SGD, "float64")) == [BY_ITSELF]


@pytest.mark.parametrize("precision", ["float64", "mixed", "bfloat16"])
def test_multiples_that_do_give_the_values_are_told(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    def lessen(group: Mapping[str, Any], weight: Tensor, number: int) -> Tensor:
        return weight.grad + 0.62 * group["weight_decay"] * weight

    monkeypatch.setattr(PlainEngine, "step", step_with(lessen))
    assert say(judge(precision))[0].startswith(("weight decay counts 0.62", "weight decay counts 0.619"))

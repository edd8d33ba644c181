"""Coefficients of real optimizers that are products of options: named where only one is within their error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.checks.base import Outcome
from moeverify.diagnose.recomputed import join_alike
from moeverify.report.words.check import describe_facts
from moeverify.report.words.step_options import describe_number
from moeverify.results.finding import Finding
from moeverify.results.step_facts import OptionNumber, OptionPower
from moeverify.train.engine import PlainEngine

OPTIONS = {"lr": 0.013, "weight_decay": 0.3, "clip_norm": 0.2}
ADAMW = {"name": "adamw", **OPTIONS, "betas": [0.9, 0.95], "eps": 1e-5}
SGD = {"name": "sgd", "lr": 0.5, "momentum": 0.8, "weight_decay": 0.03, "clip_norm": 0.2}
Step = Callable[[PlainEngine], None]
Share = Callable[[float, int], float]
"""By the beta and the number of the step, what a gradient counts."""


@pytest.fixture
def judge(judge_steps: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Return a function that trains on one device and judges its steps."""
    return partial(judge_with, monkeypatch, partial(judge_steps, ADAMW))


def judge_with(
    monkeypatch: pytest.MonkeyPatch, judge: Callable[..., Outcome], step: Step, precision: str, **options: Any
) -> Outcome:
    monkeypatch.setattr(PlainEngine, "step", step)
    return judge(precision, **options)


def adam(mean: Share, square: Share, start: Callable[[Tensor], Tensor] = torch.zeros_like) -> Step:
    """Return a step of AdamW in which gradients count otherwise, or moments start otherwise."""

    def step(engine: PlainEngine) -> None:
        engine.optimizer._opt_called = True  # which its schedule asks for
        with torch.no_grad():
            for group in engine.optimizer.param_groups:
                for weight in group["params"]:
                    state = engine.optimizer.state[weight]
                    if not state:
                        state.update(step=torch.zeros(()), exp_avg=start(weight), exp_avg_sq=weight * 0.0)
                    state["step"] += 1
                    take(group, state, weight, mean, square)

    return step


def take(group: dict[str, Any], state: dict[str, Tensor], weight: Tensor, mean: Share, square: Share) -> None:
    number, (beta1, beta2) = int(state["step"]), group["betas"]
    state["exp_avg"].mul_(beta1).add_(mean(beta1, number) * weight.grad)
    state["exp_avg_sq"].mul_(beta2).add_(square(beta2, number) * weight.grad**2)
    weight.mul_(1.0 - group["lr"] * group["weight_decay"])
    bottom = (state["exp_avg_sq"] / (1.0 - beta2**number)).sqrt() + group["eps"]
    weight.sub_(group["lr"] / (1.0 - beta1**number) * state["exp_avg"] / bottom)


def right(beta: float, number: int) -> float:
    return 1.0 - beta


def whole_at_first(beta: float, number: int) -> float:
    return 1.0 if number == 1 else 1.0 - beta


def list_causes(outcome: Outcome) -> list[str]:
    heads = [finding for finding in join_alike(outcome.findings) if not finding.follows]
    return [describe_facts(finding.facts, finding).cause for finding in heads]


@pytest.mark.parametrize("precision", ["float64", "float32", "mixed"])
def test_moments_that_begin_with_whole_gradients_are_named(judge: Callable, precision: str) -> None:
    causes = list_causes(judge(adam(whole_at_first, whole_at_first), precision))
    assert sorted(causes) == [
        "the optimizer computes exp_avg otherwise: gradient is not multiplied by 1 - beta1 in step 0 alone",
        "the optimizer computes exp_avg_sq otherwise: "
        "squared gradient is not multiplied by 1 - beta2 in step 0 alone",
    ]


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (lambda beta, _: 1.0, "gradient is not multiplied by 1 - beta1"),
        (lambda beta, _: beta, "gradient is multiplied by beta1 in place of 1 - beta1"),
        (lambda beta, _: 1.0 / (1.0 - beta), "gradient is multiplied by 1/(1 - beta1) in place of 1 - beta1"),
        (
            lambda beta, _: beta / (1.0 - beta),
            "gradient is multiplied by beta1/(1 - beta1) in place of 1 - beta1",
        ),
        (lambda beta, _: 0.137, "gradient counts 1.37 times"),
        (lambda beta, number: 0.3 if number == 2 else 0.137, "gradient counts 1.37 times"),
    ],
)
def test_a_share_is_the_product_of_options_that_it_is_alone(judge: Callable, share: Share, said: str) -> None:
    causes = list_causes(judge(adam(share, right), "float64"))
    assert f"the optimizer computes exp_avg otherwise: {said}" in causes


def test_two_products_that_are_equal_name_nothing(judge: Callable) -> None:
    outcome = judge(adam(lambda beta, _: 0.05, right), "float64", weight_decay=0.05)  # 1 - beta2
    assert "the optimizer computes exp_avg otherwise: gradient counts 0.5 times" in list_causes(outcome)


def test_in_16_bits_a_coefficient_is_an_estimate(judge: Callable) -> None:
    outcome = judge(adam(whole_at_first, whole_at_first), "bfloat16")
    told = [each for each in outcome.findings if each.facts.wrong_terms]
    assert told
    assert all(each.is_estimate for each in told)
    assert not any("is not multiplied" in each for each in list_causes(outcome))


@pytest.mark.parametrize("factor", [0.5, 0.1, 10.0])
def test_a_factor_of_the_gradient_is_no_share_of_a_moment(judge: Callable, factor: float) -> None:
    scaled = adam(lambda beta, _: factor * (1.0 - beta), lambda beta, _: factor**2 * (1.0 - beta))
    causes = list_causes(judge(scaled, "float64"))
    assert f"the optimizer computes exp_avg otherwise: gradient counts {factor:.4g} times" in causes


def test_the_larger_of_two_is_told_by_later_steps(judge: Callable) -> None:
    def largest(engine: PlainEngine) -> None:
        olds = {key: state["exp_avg_sq"].clone() for key, state in engine.optimizer.state.items()}
        adam(right, right)(engine)
        for weight, state in engine.optimizer.state.items():
            old = olds.get(weight, torch.zeros_like(weight))
            state["exp_avg_sq"].copy_(torch.maximum(0.95 * old, weight.grad**2))

    assert any(
        "it is the larger of the moment of before" in each for each in list_causes(judge(largest, "float64"))
    )


def test_what_a_moment_starts_from_is_named(judge: Callable) -> None:
    half = adam(right, right, lambda weight: torch.full_like(weight, 0.5))
    said = {
        "it starts from the weight, not from zero": adam(right, right, torch.clone),
        "each element starts from 0.5, not from zero": half,
    }
    for sentence, step in said.items():
        assert f"the optimizer computes exp_avg otherwise: {sentence}" in list_causes(judge(step, "float64"))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((), "x is not multiplied by the learning rate times the weight decay in steps 0-2 alone"),
        (
            ("rate", 2.0),
            "x is multiplied by the square of the learning rate in place of the learning rate times",
        ),
        (("1-beta2", 0.5), "x is multiplied by the root of (1 - beta2) in place of"),
    ],
)
def test_products_of_options_have_words(found: tuple[Any, ...], said: str) -> None:
    powers = (OptionPower(option=found[0], power=found[1]),) if found else ()
    expected = (OptionPower(option="rate"), OptionPower(option="decay"))
    assert describe_number("x", OptionNumber(found=powers, expected=expected, steps=(0, 1, 2))).startswith(
        said
    )


def test_a_finding_keeps_its_number_in_json(judge: Callable) -> None:
    finding = judge(adam(whole_at_first, right), "float64").findings[0]
    assert Finding.model_validate_json(finding.model_dump_json()) == finding

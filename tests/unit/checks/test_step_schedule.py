"""Learning rates by other schedules: a rule is named where it gives those of all steps, more than it has choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
from torch.optim.lr_scheduler import LambdaLR

from moeverify.case.schema import Optimizer
from moeverify.checks.base import Outcome
from moeverify.checks.step_schedule import Rates, name_schedule
from moeverify.diagnose.recomputed import join_alike
from moeverify.report.words.check import describe_facts
from moeverify.report.words.rates import describe_form
from moeverify.results.step_facts import ScheduleForm, ScheduleName, ScheduleWay
from moeverify.train import state
from moeverify.train.schedule import find_factor, list_rates

COSINE = {"lr": 0.5, "schedule": "cosine"}
WARMING = {"lr": 0.5, "warmup_steps": 2}
BOTH = {**COSINE, "warmup_steps": 2}


def name(
    options: dict[str, Any], make: Callable[[int, Callable[[int], float]], float], steps: int = 3
) -> list[Any]:
    """Return the rules for the factors that `make` gives the steps, by their number and the recipe's."""
    spec = Optimizer.model_validate(options)

    def right(step: int) -> float:
        return find_factor(spec, steps, step)

    seen = {step: spec.lr * make(step, right) for step in range(steps)}
    rates = Rates(seen, list_rates(spec, steps), spec, {"ranks": 4, "micro-batches": 3})
    return [(form.way, form.name or form.number) for form in name_schedule(rates)]


@pytest.mark.parametrize(
    ("options", "make", "found"),
    [
        (COSINE, lambda step, _: math.cos(math.pi / 6.0 * step), [("shape", "quarter-cosine")]),
        (COSINE, lambda step, _: 1.0, [("shape", "constant")]),
        (COSINE, lambda step, _: (1.0 - step / 3.0) ** 2, [("shape", "square")]),
        (COSINE, lambda step, _: (1.0 + step) ** -0.5, [("shape", "inverse-root")]),
        (COSINE, lambda step, right: right(step + 1), [("shifted", 1.0)]),
        (COSINE, lambda step, right: right(2 * step), [("faster", 2.0)]),
        (COSINE, lambda step, right: 0.2 + 0.8 * right(step), [("floor", pytest.approx(0.2))]),
        (COSINE, lambda step, _: 0.7**step, [("geometric", pytest.approx(0.7))]),
        (COSINE, lambda step, _: 0.5 + 0.5 * math.cos(math.pi / 6.0 * step), [("length", 6.0)]),
        (COSINE, lambda step, right: 2.0 * right(step), [("scaled", "ranks")]),
        (COSINE, lambda step, right: right(step) / 3.0, [("scaled", "micro-batches")]),
        (WARMING, lambda step, _: step / 3.0, [("shifted", -1.0)]),
        (WARMING, lambda step, _: 1.0, [("no-warmup", 0.0)]),
        # Too little is off, or by no rule.
        (COSINE, lambda step, right: right(step) if step < 2 else 0.5, []),
        (COSINE, lambda step, _: (1.0, 0.83, 0.31)[step], []),
        (COSINE, lambda step, right: right(step), []),
        (WARMING, lambda step, right: 1.37 * right(step), []),
    ],
)
def test_a_schedule_is_the_rule_that_gives_all_rates(
    options: dict[str, Any], make: Callable[..., float], found: list[Any]
) -> None:
    assert name(options, make) == found


def test_a_warmup_is_told_from_a_late_schedule_by_the_decay() -> None:
    assert name(BOTH, lambda step, right: step / 3.0 if step < 3 else right(step), 6) == [("warmup", 0.0)]
    assert name(BOTH, lambda step, right: right(step - 1) if step else 0.0, 6) == [("shifted", -1.0)]
    assert name(
        BOTH, lambda step, _: min(1.0, (step + 1) / 3.0) * 0.5 * (1.0 + math.cos(math.pi * step / 6.0)), 6
    ) == [("decay-from-start", 0.0)]


def test_two_choices_need_three_rates() -> None:
    assert name(WARMING, lambda step, _: step / 4.0, 3) == [("warmup", 0.0)]
    assert name(WARMING, lambda step, _: step / 4.0, 2) == []


def test_the_rates_of_a_run_name_its_schedule(judge_steps: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(spec: Optimizer, optimizer: Any, num_steps: int) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: math.cos(0.5 * math.pi * step / num_steps))

    monkeypatch.setattr(state, "build_schedule", build)
    outcome: Outcome = judge_steps({"name": "sgd", **COSINE}, "bfloat16")
    (head,) = [each for each in join_alike(outcome.findings) if not each.follows]
    assert "falls along a quarter of a cosine" in describe_facts(head.facts, head).cause


def test_all_rules_have_words() -> None:
    for way in get_args(ScheduleWay):
        assert describe_form(ScheduleForm(way=way, number=0.5 if way == "scaled" else 2.0, name="root"))
    shapes = set(get_args(ScheduleName)) - {"", "ranks", "data-parallel ranks", "micro-batches"}
    assert all(describe_form(ScheduleForm(way="shape", name=name)) for name in shapes)

"""Steps of optimizers with one part or two made otherwise: each is told by its ways, and by no other ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moeverify.case.schema import Optimizer
from moeverify.checks.base import Outcome
from moeverify.diagnose.recomputed import join_alike
from moeverify.report.words.check import describe_facts
from moeverify.report.words.step_changes import describe_form
from moeverify.results.checks import Kind
from moeverify.results.step_facts import StepChange, StepForm
from moeverify.train.adam_grammar import AdamMoment, AdamStep
from moeverify.train.engine import PlainEngine
from moeverify.train.recomputation import StepValues
from moeverify.train.sgd_grammar import SgdMomentum, SgdStep

OPTIONS = {"lr": 0.01, "weight_decay": 0.3, "clip_norm": 0.2}
ADAMW = {"name": "adamw", **OPTIONS, "betas": [0.9, 0.95], "eps": 1e-5}
State = dict[str, Tensor]


@pytest.fixture
def judge(judge_steps: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Return a function that trains on one device and judges its steps."""
    return partial(judge_steps, ADAMW)


def average(state: State, gradient: Tensor, betas: list[float]) -> None:
    """Take a gradient into both moments, as Adam does."""
    state["exp_avg"].lerp_(gradient, 1.0 - betas[0])
    state["exp_avg_sq"].mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])


def step_by(make: Callable[[Mapping[str, Any], State, Tensor, int], None]) -> Callable[[PlainEngine], None]:
    """Return a step in which `make` gets the options, the state, the weight and the number of the step."""

    def step(engine: PlainEngine) -> None:
        optimizer = engine.optimizer
        optimizer._opt_called = True  # which its schedule asks for
        with torch.no_grad():
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    state = optimizer.state[weight]
                    if not state:
                        zeros = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                        state.update(step=torch.zeros(()), **zeros)
                    state["step"] += 1
                    make(group, state, weight, int(state["step"]))

    return step


def decay(group: Mapping[str, Any], weight: Tensor) -> None:
    weight.mul_(1.0 - group["lr"] * group["weight_decay"])


def list_corrected(group: Mapping[str, Any], state: State, number: int) -> tuple[Tensor, Tensor]:
    first, second = (1.0 - beta**number for beta in group["betas"])
    return state["exp_avg"] / first, state["exp_avg_sq"] / second


def by_cube_root_of_nothing(group: Mapping[str, Any], state: State, weight: Tensor, number: int) -> None:
    average(state, weight.grad, group["betas"])
    mean, square = list_corrected(group, state, number)
    decay(group, weight)
    weight.sub_(group["lr"] * mean / (square + group["eps"]))


def by_wide_epsilon(group: Mapping[str, Any], state: State, weight: Tensor, number: int) -> None:
    average(state, weight.grad, group["betas"])
    mean, square = list_corrected(group, state, number)
    decay(group, weight)
    weight.sub_(group["lr"] * mean / (square.sqrt() + 7e-4))


def by_bound(group: Mapping[str, Any], state: State, weight: Tensor, number: int) -> None:
    average(state, weight.grad, group["betas"])
    mean, square = list_corrected(group, state, number)
    decay(group, weight)
    weight.sub_(group["lr"] * (mean / (square.sqrt() + group["eps"])).clamp(-0.8, 0.8))


def by_two_mistakes(group: Mapping[str, Any], state: State, weight: Tensor, number: int) -> None:
    average(state, weight.grad, group["betas"])
    decay(group, weight)
    weight.addcdiv_(state["exp_avg"], (state["exp_avg_sq"] + group["eps"]).sqrt(), value=-group["lr"])


def by_three_mistakes(group: Mapping[str, Any], state: State, weight: Tensor, number: int) -> None:
    """Without corrections, with epsilon in the root, and with a decay that the rate does not multiply."""
    average(state, weight.grad, group["betas"])
    weight.mul_(1.0 - group["weight_decay"])
    weight.addcdiv_(state["exp_avg"], (state["exp_avg_sq"] + group["eps"]).sqrt(), value=-group["lr"])


def by_regularization(group: Mapping[str, Any], state: State, weight: Tensor, number: int) -> None:
    average(state, weight.grad + group["weight_decay"] * weight, group["betas"])
    mean, square = list_corrected(group, state, number)
    weight.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


def by_belief(group: Mapping[str, Any], state: State, weight: Tensor, number: int) -> None:
    state["exp_avg"].lerp_(weight.grad, 1.0 - group["betas"][0])
    beta, difference = group["betas"][1], weight.grad - state["exp_avg"]
    state["exp_avg_sq"].mul_(beta).addcmul_(difference, difference, value=1.0 - beta)
    mean, square = list_corrected(group, state, number)
    decay(group, weight)
    weight.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


def by_trust(group: Mapping[str, Any], state: State, weight: Tensor, number: int) -> None:
    average(state, weight.grad, group["betas"])
    mean, square = list_corrected(group, state, number)
    direction = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * weight
    size, length = float(weight.norm()), float(direction.norm())
    weight.sub_(group["lr"] * (size / length if size and length else 1.0) * direction)


def by_chance(group: Mapping[str, Any], state: State, weight: Tensor, number: int) -> None:
    average(state, weight.grad, group["betas"])
    mean, square = list_corrected(group, state, number)
    decay(group, weight)
    generator = torch.Generator().manual_seed(number)
    noise = torch.rand(weight.shape, generator=generator, dtype=weight.dtype)
    weight.sub_(group["lr"] * (0.5 + noise) * mean / (square.sqrt() + group["eps"]))


def say(outcome: Outcome) -> str:
    """Return what is said of what follows from nothing else."""
    heads = [finding for finding in join_alike(outcome.findings) if not finding.follows]
    return "\n".join(describe_facts(each.facts, each).cause for each in heads)


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize(
    ("make", "changes", "number"),
    [
        (by_cube_root_of_nothing, ["no-root"], None),
        (by_wide_epsilon, ["other-epsilon"], 7e-4),
        (by_bound, ["bounded-step"], 0.8),
        (by_two_mistakes, ["no-correction", "epsilon-in-root"], None),
        (by_three_mistakes, ["no-correction", "epsilon-in-root", "decay-without-rate"], None),
        (by_regularization, ["decay-in-gradient"], None),
        (by_belief, ["square-of-difference"], None),
    ],
)
def test_what_is_made_otherwise_is_named(
    judge: Callable,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., None],
    changes: list[StepChange],
    number: float | None,
    precision: str,
) -> None:
    monkeypatch.setattr(PlainEngine, "step", step_by(make))
    said = say(judge(precision))
    wanted = describe_form(StepForm(changes=tuple(changes), number=number))
    assert [line.partition("otherwise: ")[2] for line in said.splitlines()] == [wanted]


def test_a_factor_of_its_own_norms_is_a_trust_ratio(judge: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainEngine, "step", step_by(by_trust))
    said = say(judge("float64"))
    assert "trust ratio" in said
    assert "counts" not in said


def test_gradients_that_are_clipped_one_by_one_are_named(
    judge: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = PlainEngine.clip

    def clip_each(self: PlainEngine, shards: Any, norm: Tensor, most: float) -> Tensor:
        for shard in shards:
            if shard.tensor.grad is not None:
                shard.tensor.grad.mul_((most / (shard.tensor.grad.norm() + 1e-6)).clamp(max=1.0))
        return clip(self, [], norm, most)

    monkeypatch.setattr(PlainEngine, "clip", clip_each)
    assert "by its own norm" in say(judge("float64")).splitlines()[0]


@pytest.mark.parametrize("precision", ["float64", "mixed", "bfloat16"])
def test_a_step_off_by_chance_has_no_formula(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(PlainEngine, "step", step_by(by_chance))
    updates = [each for each in judge(precision).findings if each.kind == Kind.UPDATE]
    assert updates
    assert all(not each.facts.forms and not each.facts.means for each in updates)


def draw_step() -> tuple[StepValues, Tensor]:
    """Return what a step works on, and what it has made: in 12 elements of one shard."""
    generator = torch.Generator().manual_seed(3)

    def draw(size: float = 1.0) -> Tensor:
        return size * torch.randn(12, generator=generator, dtype=torch.float64)

    before = {"exp_avg": draw(), "exp_avg_sq": draw().square(), "momentum_buffer": draw()}
    after = {"exp_avg": draw(), "exp_avg_sq": draw().square(), "momentum_buffer": draw()}
    values = StepValues(
        3, 0.3, 0.5, draw(), draw(), before, after, clip=torch.tensor(0.6, dtype=torch.float64)
    )
    return values, draw()


def solve(target: Tensor, direction: Tensor) -> Tensor:
    return ((target * direction).sum() / (direction * direction).sum()).expand_as(target)


def list_grammars() -> Mapping[str, Any]:
    values, actual = draw_step()
    adam = Optimizer(name="adamw", betas=(0.9, 0.8), eps=0.2, clip_norm=0.4)
    sgd = Optimizer(name="sgd", momentum=0.7, clip_norm=0.4)
    return {
        "adamw": AdamStep(adam, values, actual, solve, decays_weight=True).grammar(),
        "mean": AdamMoment(adam, values, "exp_avg", actual, solve, decays=False).grammar(),
        "mean of adam": AdamMoment(adam, values, "exp_avg", actual, solve, decays=True).grammar(),
        "square": AdamMoment(adam, values, "exp_avg_sq", actual, solve, decays=False).grammar(),
        "sgd": SgdStep(sgd, values).grammar(),
        "momentum": SgdMomentum(sgd, values, actual, solve).grammar(),
    }


@pytest.mark.parametrize("name", list_grammars())
def test_no_way_is_the_right_one_or_another_way(name: str) -> None:
    grammar = list_grammars()[name]
    made = [grammar.make(())] + [grammar.make(changes) for changes in grammar.list_changes(1)]
    # A number that is solved for has to be found, which chance does not give here.
    keys = {tuple(each.values.nan_to_num(7.0).tolist()) for each in made if each.number is None}
    assert len(keys) == sum(each.number is None for each in made)


def test_every_way_has_words() -> None:
    ways = {way for grammar in list_grammars().values() for part in grammar.parts.values() for way in part}
    assert ways <= set(get_args(StepChange))
    assert all(describe_form(StepForm(changes=(way,), number=2.0)) for way in get_args(StepChange))


def test_parameters_that_are_not_clipped_are_not_clipped_by_their_own_norm(
    judge: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = PlainEngine.clip

    def clip_matrices(self: PlainEngine, shards: Any, norm: Tensor, most: float) -> Tensor:
        return clip(self, [shard for shard in shards if len(shard.region.shape) > 1], norm, most)

    monkeypatch.setattr(PlainEngine, "clip", clip_matrices)
    said = say(judge("float64"))
    assert "is not clipped" in said
    assert "norm" not in said

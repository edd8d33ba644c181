"""Steps of real optimizers on one device, right and with bugs, each recomputed from its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from moeverify.cases.schema import Optimizer
from moeverify.explain.fitting.recomputed import join_alike
from moeverify.report.words.check import describe_facts
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.step_facts import RecomputedFacts
from moeverify.train.engine import PlainEngine
from moeverify.train.schedule import list_rates
from moeverify.verification.checks.base import CheckOutcome, ShownTensors
from moeverify.verification.checks.optimizer_step import OptimizerWatch, judge_rows

pytestmark = pytest.mark.slow

ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.2, "schedule": "linear"}
ADAM = {**ADAMW, "name": "adam", "betas": [0.9, 0.99]}
SGD = {"name": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.2}
SGD_DECAYING = {**SGD, "schedule": "cosine"}
PLAIN_SGD = {"name": "sgd", "lr": 0.5}
PRECISIONS = ("float64", "float32", "bfloat16", "mixed")


@pytest.fixture
def judge(
    run_ranks: Callable, train_alone: Callable, make_one_device_case: Callable
) -> Callable[..., CheckOutcome]:
    """Return a function that trains on one device and judges its steps."""
    shown: ShownTensors = run_ranks({0: {}}).shown()

    def do(optimizer: dict[str, Any], precision: str, kernels: str = "foreach") -> CheckOutcome:
        case = make_one_device_case(optimizer, precision)
        rows = train_alone(case, lambda program: OptimizerWatch(case.recipe, program), kernels)
        return judge_rows(shown, [rows], list_rates(case.recipe.optimizer, case.recipe.steps))

    return do


@pytest.mark.parametrize("kernels", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", [ADAMW, ADAM, SGD, PLAIN_SGD], ids=["adamw", "adam", "sgd", "plain"])
def test_sound_steps_pass(judge: Callable, optimizer: dict[str, Any], precision: str, kernels: str) -> None:
    if (optimizer["name"], precision, kernels) == ("sgd", "bfloat16", "fused"):
        # torch 2.13 on a CPU: SGD with fused=True silently leaves weights of bfloat16 unchanged.
        assert "does not change the weights on rank 0" in causes(judge(PLAIN_SGD, precision, kernels))
        return
    outcome = judge(optimizer, precision, kernels)
    assert outcome.findings == ()
    updates = [key for key in outcome.limits if key[1] == Kind.UPDATE]
    assert len(updates) == 3 * len({name for _, _, name in updates})
    if precision != "bfloat16":
        assert max(outcome.limits.values()) < 1e-2, "float32 weights keep nearly all of an update"


def fused_multiply_add(one: Tensor, other: Tensor, added: Tensor) -> Tensor:
    """Return one * other + added, rounded to float32 once."""
    return (one.double() * other.double() + added.double()).float()


def step_as_cuda_does(engine: PlainEngine) -> None:
    """Do the arithmetic of torch's fused AdamW on CUDA (aten/src/ATen/native/cuda/fused_adam_utils.cuh)."""
    engine.optimizer._opt_called = True  # otherwise the scheduler expects torch's own step
    for group in engine.optimizer.param_groups:
        lr, decay, eps = (torch.tensor(float(group[name])) for name in ("lr", "weight_decay", "eps"))
        beta1, beta2 = (torch.tensor(beta, dtype=torch.float32) for beta in group["betas"])
        for weight in group["params"]:
            state = engine.optimizer.state[weight]
            if not state:
                zeros = torch.zeros_like(weight)
                state.update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
            state["step"] += 1
            gradient, mean, squared = weight.grad, state["exp_avg"], state["exp_avg_sq"]
            square = gradient * gradient
            with torch.no_grad():
                weight.sub_(lr * decay * weight)
                rest = fused_multiply_add(-beta1, gradient, gradient)
                mean.copy_(fused_multiply_add(beta1, mean, rest))
                rest = fused_multiply_add(-beta2, square, square)
                squared.copy_(fused_multiply_add(beta2, squared, rest))
                correction1, correction2 = (1.0 - beta ** state["step"] for beta in (beta1, beta2))
                weight.sub_(lr / correction1 * mean / (squared.sqrt() / correction2.sqrt() + eps))


@pytest.mark.parametrize("betas", [[0.9, 0.95], [0.9, 0.999], [0.95, 0.9999]], ids=str)
def test_a_kernel_may_round_its_options(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, betas: list[float]
) -> None:
    monkeypatch.setattr(PlainEngine, "step", step_as_cuda_does)
    outcome = judge({**ADAMW, "betas": betas}, "float32")
    assert outcome.findings == ()


def change_options(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Give the optimizer other options than the recipe's."""
    begin = PlainEngine.begin

    def begin_otherwise(self: PlainEngine, *arguments: Any) -> optim.Optimizer:
        built = begin(self, *arguments)
        for group in built.param_groups:
            group.update(options)
        return built

    monkeypatch.setattr(PlainEngine, "begin", begin_otherwise)


def causes(outcome: CheckOutcome, code: Cause = Cause.OPTIMIZER) -> str:
    assert {finding.code for finding in outcome.findings} == {code}
    return "\n".join(describe_facts(finding.facts, finding).cause for finding in outcome.findings)


@pytest.mark.parametrize("precision", ["float64", "mixed"])
def test_a_weight_decay_that_is_left_out_is_named(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    change_options(monkeypatch, weight_decay=0.0)
    outcome = judge(ADAMW, precision)
    assert all(len(finding.index) > 1 for finding in outcome.findings), "vectors have no decay"
    assert "the optimizer computes the update differently: weight decay is left out" in causes(outcome)


@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize("options", [ADAMW, {**SGD, "weight_decay": 0.1}], ids=["adamw", "sgd"])
def test_a_weight_decay_of_parameters_that_have_none_is_measured(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], precision: str
) -> None:
    change_options(monkeypatch, weight_decay=0.1)
    outcome = judge(options, precision)
    assert all(len(finding.index) == 1 for finding in outcome.findings), "matrices have it by right"
    assert "weight decay is present, but not in the options" in causes(outcome)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_betas_are_measured(judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    change_options(monkeypatch, betas=(0.8, 0.95))
    outcome = judge(ADAMW, precision)
    moments = {
        finding.tensor.rpartition(".")[2] for finding in outcome.findings if finding.kind != Kind.UPDATE
    }
    assert moments == {"exp_avg"}
    fitted = [finding.facts for finding in outcome.findings if finding.kind != Kind.UPDATE]
    found = [facts.terms[1].found for facts in fitted if isinstance(facts, RecomputedFacts)]
    assert torch.tensor([each for each in found if each is not None]).median() == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bias_correction_that_is_missing_is_found(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    step = PlainEngine.step

    def step_late(self: PlainEngine) -> None:
        for state in self.optimizer.state.values():
            state["step"].fill_(1e6)  # so late nothing is corrected
        step(self)

    monkeypatch.setattr(PlainEngine, "step", step_late)
    outcome = judge(ADAMW, precision)
    assert {finding.step for finding in outcome.findings} == {1, 2}
    assert {finding.kind for finding in outcome.findings} == {Kind.UPDATE}


def take_rate(monkeypatch: pytest.MonkeyPatch, choose: Callable[[int, int], float | None]) -> None:
    """Set the learning rate of each group (number, step) to the value of `choose`, where it returns one."""
    step, taken = PlainEngine.norm, [0]

    def norm(self: PlainEngine) -> Tensor | None:
        for number, group in enumerate(self.optimizer.param_groups):
            rate = choose(number, taken[0])
            if rate is not None:
                group["lr"] = rate
        taken[0] += 1
        return step(self)

    monkeypatch.setattr(PlainEngine, "norm", norm)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", [ADAMW, SGD_DECAYING], ids=["adamw", "sgd"])
def test_the_rate_of_another_step_is_named_and_nothing_else(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, optimizer: dict[str, Any], precision: str
) -> None:
    rates = list_rates(Optimizer(**optimizer), 3)
    take_rate(monkeypatch, lambda group, step: rates[min(step + 1, 2)])
    outcome = judge(optimizer, precision)
    said = {describe_facts(finding.facts, finding).cause for finding in outcome.findings if finding.step == 0}
    assert said == {
        f"the learning rate of step 0 is {rates[1]:.6g}, as in step 1; the recipe gives {rates[0]:.6g}"
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["float64", "float32", "mixed"])
@pytest.mark.parametrize("moment", ["", "exp_avg"])
def test_what_is_rounded_after_a_step_is_named(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype, moment: str
) -> None:
    step = PlainEngine.step

    def step_and_round(self: PlainEngine) -> None:
        step(self)
        for parameter, state in self.optimizer.state.items():
            kept = state[moment] if moment else parameter.data
            kept.copy_(kept.to(dtype))

    monkeypatch.setattr(PlainEngine, "step", step_and_round)
    outcome = judge(ADAMW, precision)
    name = str(dtype).removeprefix("torch.")
    what = f"{moment} holds" if moment else "the weights hold"
    first = [finding for finding in join_alike(outcome.findings) if finding.step == 0]
    leading = [finding for finding in first if not finding.follows]
    assert len(leading) == 1
    said = {describe_facts(finding.facts, finding).cause for finding in leading}
    assert said == {f"after the optimizer's step {what} only values that {name} can represent"}


@pytest.mark.parametrize("precision", ["float64", "mixed"])
def test_weights_that_stand_still_are_not_said_to_be_rounded(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    step = PlainEngine.step

    def step_in_vain(self: PlainEngine) -> None:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        kept = [parameter.data.clone() for parameter in parameters]
        step(self)
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.data.copy_(values)

    monkeypatch.setattr(PlainEngine, "step", step_in_vain)
    outcome = judge({**ADAMW, "lr": 1e-3}, precision)
    assert set(causes(outcome).split("\n")) == {"the optimizer's step does not change the weights on rank 0"}
    assert [finding.follows for finding in join_alike(outcome.findings)].count("") == 1
    assert Cause.ROUNDING not in {finding.code for finding in outcome.findings}


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_the_rate_of_one_group_is_named(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    take_rate(monkeypatch, lambda group, step: 0.002 if group == 1 else None)
    outcome = judge(ADAMW, precision)
    assert {len(finding.index) > 1 for finding in outcome.findings} == {False}
    assert "the learning rate of step 0 is 0.002; the recipe gives 0.01" in causes(outcome)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_gradients_that_were_not_clipped_are_named(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str, optimizer: dict[str, Any]
) -> None:
    clip = PlainEngine.clip
    monkeypatch.setattr(PlainEngine, "clip", lambda self, shards, *rest: clip(self, [], *rest))
    outcome = judge(optimizer, precision)
    assert "gradient is not clipped" in causes(outcome, Cause.NORM)


def test_a_single_element_is_found(judge: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    step = PlainEngine.step

    def step_and_touch(self: PlainEngine) -> None:
        step(self)
        weight = self.optimizer.param_groups[0]["params"][0]
        with torch.no_grad():
            weight[3, 5] += 0.25

    monkeypatch.setattr(PlainEngine, "step", step_and_touch)
    outcome = judge(ADAMW, "bfloat16")
    assert {(finding.kind, finding.index) for finding in outcome.findings} == {(Kind.UPDATE, (3, 5))}
    assert all("does not follow" in line for line in causes(outcome).splitlines())


def test_a_weight_that_is_no_number_is_found(judge: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    step = PlainEngine.step

    def step_to_nan(self: PlainEngine) -> None:
        step(self)
        with torch.no_grad():
            self.optimizer.param_groups[0]["params"][0][0, 0] = torch.nan

    monkeypatch.setattr(PlainEngine, "step", step_to_nan)
    assert judge(SGD, "float32").result.verdict == "mismatch"


def test_the_limit_says_how_little_bfloat16_keeps_of_a_small_update(judge: Callable) -> None:
    small = judge({**ADAMW, "lr": 1e-4}, "bfloat16").limits
    large = judge({**ADAMW, "lr": 1e-2}, "bfloat16").limits
    norms = [key for key in small if key[1] == Kind.UPDATE and key[2].endswith("norm.weight")]
    assert norms
    assert all(small[key] > 0.5 for key in norms), "an update of 1e-4 is no unit in the last place of 1"
    assert all(large[key] < 0.5 for key in norms if key[0] == 0), (
        "one of 1e-2 is, and what it is rounded to is mostly known"
    )
    assert large[0, Kind.UPDATE, "embed.weight"] < 0.5, "weights without a gradient are known to stay"


@pytest.mark.parametrize("kernels", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("away", [-torch.inf, torch.inf])
def test_one_unit_in_the_last_place_of_a_weight_is_found(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, away: float, kernels: str
) -> None:
    step, touched = PlainEngine.step, []

    def step_and_touch(self: PlainEngine) -> None:
        step(self)
        if touched:
            return
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                if weight.ndim == 1 or not touched:
                    with torch.no_grad():
                        some = weight.reshape(-1)[:8]
                        some.copy_(torch.nextafter(some, torch.full_like(some, away)))
                    touched.append(weight)

    monkeypatch.setattr(PlainEngine, "step", step_and_touch)
    outcome = judge(ADAMW, "bfloat16", kernels)
    found = {
        finding.tensor for finding in outcome.findings if (finding.step, finding.kind) == (0, Kind.UPDATE)
    }
    assert len(touched) > 1
    assert len(found) == len(touched)


def step_by(change: Callable[..., Tensor]) -> Callable[[PlainEngine], None]:
    """Return a step of AdamW with right moments, whose weight update is modified by `change`."""

    def step(engine: PlainEngine) -> None:
        groups = engine.optimizer.param_groups
        before = {weight: weight.detach().clone() for group in groups for weight in group["params"]}
        engine.optimizer.step()
        with torch.no_grad():
            for group in groups:
                for weight in group["params"]:
                    state = engine.optimizer.state[weight]
                    wide = {name: state[name].to(torch.float64) for name in ("exp_avg", "exp_avg_sq")}
                    old, number = before[weight].to(torch.float64), float(state["step"])
                    moved = change(group, number, **wide)
                    weight.copy_(old * (1.0 - group["lr"] * group["weight_decay"]) - group["lr"] * moved)

    return step


def by_root(group: dict[str, Any], number: float, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    first, second = (1.0 - beta**number for beta in group["betas"])
    return exp_avg / first / (exp_avg_sq / second + group["eps"]).sqrt()


def by_next_step(group: dict[str, Any], number: float, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    first, second = (1.0 - beta ** (number + 1.0) for beta in group["betas"])
    return exp_avg / first / ((exp_avg_sq / second).sqrt() + group["eps"])


def without_corrections(group: dict[str, Any], number: float, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    return exp_avg / (exp_avg_sq.sqrt() + group["eps"])


@pytest.mark.parametrize("precision", ["float64", "float32", "mixed"])
@pytest.mark.parametrize("change", [by_root, by_next_step, without_corrections])
def test_another_formula_of_the_step_is_found(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Tensor], precision: str
) -> None:
    monkeypatch.setattr(PlainEngine, "step", step_by(change))
    outcome = judge({**ADAMW, "eps": 1e-5}, precision)
    assert {finding.kind for finding in outcome.findings} == {Kind.UPDATE}


def test_a_step_in_no_known_way_is_named_by_no_factor(
    judge: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damped(group: dict[str, Any], number: float, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
        return exp_avg / (exp_avg_sq.sqrt() + exp_avg.abs() + 0.01)

    monkeypatch.setattr(PlainEngine, "step", step_by(damped))
    findings = judge(ADAMW, "float32").findings
    assert findings
    assert not any(finding.names_operation for finding in findings)


def test_nesterovs_momentum_is_found(judge: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    change_options(monkeypatch, nesterov=True)
    assert Kind.UPDATE in {finding.kind for finding in judge(SGD, "float32").findings}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("factor", "power"), [(2.0**-11, -11), (2.0**6, 6), (0.0, None), (3e-4, None)])
def test_a_scale_of_the_loss_that_gradients_keep(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, precision: str, factor: float, power: int | None
) -> None:
    step = PlainEngine.step

    def scaled(self: PlainEngine) -> None:
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                weight.grad.mul_(factor)
        step(self)

    monkeypatch.setattr(PlainEngine, "step", scaled)
    joined = join_alike(judge(SGD, precision).findings)
    (head, *_) = [finding for finding in joined if not finding.follows]
    (term,) = [term for term in head.facts.terms if term.name == "gradient"]
    assert term.power_of_two == power
    if factor == 0.0:
        assert "gradient is left out" in describe_facts(head.facts, head).cause


def leave_out_gradients(monkeypatch: pytest.MonkeyPatch, steps: Collection[int]) -> None:
    """Remove the gradients of the last block's parameters in these steps, as for experts without tokens."""
    backward, number = PlainEngine.backward, [0]

    def backward_in_part(self: PlainEngine, loss: Tensor) -> None:
        backward(self, loss)
        if number[0] in steps:
            for group in self.optimizer.param_groups:
                for weight in group["params"][-2:]:
                    weight.grad = None
        number[0] += 1

    monkeypatch.setattr(PlainEngine, "backward", backward_in_part)


@pytest.mark.parametrize("kernels", ["foreach", "fused"])
@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize("optimizer", [ADAMW, ADAM, SGD], ids=["adamw", "adam", "sgd"])
@pytest.mark.parametrize("steps", [{0}, {1}, {0, 1}], ids=str)
def test_a_parameter_without_a_gradient_counts_no_step(
    judge: Callable,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: dict[str, Any],
    precision: str,
    kernels: str,
    steps: set[int],
) -> None:
    if (optimizer["name"], kernels) == ("sgd", "fused"):
        pytest.skip("torch 2.13 refuses a momentum that other parameters have and this one lacks")
    leave_out_gradients(monkeypatch, steps)
    outcome = judge(optimizer, precision, kernels)
    assert outcome.findings == ()
    counts = Counter(name for _, kind, name in outcome.limits if kind == Kind.UPDATE)
    assert set(counts.values()) == {3, 3 - len(steps)}


@pytest.mark.parametrize("counter", ["common", "still"])
def test_a_counter_that_is_wrong_is_found_beside_a_parameter_without_a_gradient(
    judge: Callable, monkeypatch: pytest.MonkeyPatch, counter: str
) -> None:
    leave_out_gradients(monkeypatch, {1})
    step, number = PlainEngine.step, [0]

    def step_by_another_counter(self: PlainEngine) -> None:
        for state in self.optimizer.state.values():
            state["step"].fill_(number[0] if counter == "common" else 0)
        step(self)
        number[0] += 1

    monkeypatch.setattr(PlainEngine, "step", step_by_another_counter)
    findings = judge(ADAMW, "float64").findings
    assert {finding.kind for finding in findings} == {Kind.UPDATE}
    if counter == "common":  # only of those that missed a step, in the step after it
        assert {finding.step for finding in findings} == {2}
        assert len(findings) == 4
    else:
        assert {finding.step for finding in findings} == {1, 2}

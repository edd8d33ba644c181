"""Two optimizers in one script, and models or optimizers that are built again, recorded in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moeverify.errors import FormatError
from moeverify.report.words.cause import describe_cause
from moeverify.results.run import CaseResult
from moeverify.results.script import OptionFacts
from moeverify.scripts.compare.compare import compare_runs
from moeverify.scripts.record.command import count_steps
from moeverify.scripts.record.read import RecordedRun
from moeverify.scripts.record.recorder import ScriptRecorder
from moeverify.scripts.record.settings import Settings
from moeverify.train.calls.hooks import Hooks, install

Record = Callable[[str, Callable[[], object]], Path]


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    installed: list[Hooks] = []

    def run(name: str, script: Callable[[], object]) -> Path:
        recorder = ScriptRecorder(Settings(out=tmp_path / name, first=0, last=5), 0, 1)
        installed.append(install(recorder))
        torch.manual_seed(0)
        script()
        recorder.close()
        installed.pop().remove()
        return tmp_path / name

    yield run
    for hooks in installed:
        hooks.remove()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    (model(torch.arange(8.0).reshape(2, 4) / 8).square().mean() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_two(factor: float = 1.0) -> None:
    """Train two models with equal names in turn; the loss of the first is multiplied by a factor."""
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(2):
        for number, pair in enumerate(zip(models, optimizers, strict=True)):
            train(*pair, factor=1.0 if number else factor)


def build_twice() -> None:
    """Build a model and its optimizer again, after the first ones are gone."""
    for _ in range(2):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            train(model, optimizer)


def restart() -> None:
    """Train a model with one optimizer, and then with another one."""
    model = nn.Linear(4, 4)
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            train(model, optimizer)


def compare(expected: Path, actual: Path) -> CaseResult:
    return compare_runs(RecordedRun.read(expected), RecordedRun.read(actual))


def test_tensors_of_the_same_name_of_two_models_are_both_compared(record: Record) -> None:
    right, wrong = record("right", train_two), record("wrong", lambda: train_two(4.0))
    assert RecordedRun.read(right).names == ["weight", "bias", "model1.weight", "model1.bias"]
    result = compare(right, wrong)
    tensors = {each.tensor for each in result.findings if each.check == "gradient" and each.step == 0}
    assert tensors == {"weight", "bias"}
    assert any("RUN_A trains several models: Linear" in note for note in result.notes)


@pytest.mark.parametrize("script", [train_two, build_twice, restart])
def test_a_run_equals_itself(record: Record, script: Callable[[], None]) -> None:
    result = compare(record("once", script), record("again", script))
    assert result.verdict == "pass", result.findings


def test_a_model_that_is_built_again_goes_on_with_the_next_step(record: Record) -> None:
    run = RecordedRun.read(record("twice", build_twice))
    gradients = {(step, name) for step, kind, name in run.ranks[0].values if kind == "gradient"}
    first = {(step, name) for step in range(3) for name in ("weight", "bias")}
    assert gradients == first | {(step + 3, f"model1.{name}") for step, name in first}


def test_an_optimizer_that_is_built_again_goes_on_with_the_next_step(record: Record) -> None:
    assert RecordedRun.read(record("restart", restart)).steps == list(range(6))


def test_a_script_that_never_steps_is_named_as_one(record: Record) -> None:
    never = record("never", lambda: nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward())
    assert count_steps(never) == {0: 0}
    with pytest.raises(FormatError, match="never no optimizer of torch has stepped"):
        compare(record("two", train_two), never)


def test_runs_of_other_models_are_refused(record: Record) -> None:
    def train_another() -> None:
        model = nn.Sequential(nn.Linear(4, 3))
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(
        FormatError, match=r"no parameter of .*another is one of .*one: they train other models"
    ):
        compare(record("one", train_two), record("another", train_another))


def train_with_adam(second_moment: float = 0.0) -> None:
    """Train with an existing second moment, so the update of the first step hardly shows the error."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.full_like(parameter, second_moment),
        }
    train(model, optimizer)


def test_moments_are_compared_and_step_counters_are_not(record: Record) -> None:
    right = record("right", train_with_adam)
    result = compare(right, record("again", train_with_adam))
    assert next(each.tensors for each in result.checks if each.name == "optimizer state") == 4
    result = compare(right, record("wrong", lambda: train_with_adam(1e-6)))
    wrong = {each.tensor for each in result.findings if each.check == "optimizer state"}
    assert wrong == {"weight.exp_avg_sq", "bias.exp_avg_sq"}


class Wraps(torch.optim.Optimizer):
    """An optimizer whose step is that of another one on its parameters, as in ZeroRedundancyOptimizer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.inner = torch.optim.Adam(self.param_groups, lr=0.1)

    def step(self, closure: object = None) -> None:
        self.inner.step()


class Inherits(torch.optim.Adam):
    """An optimizer whose step is that of its base class."""

    def step(self, closure: object = None) -> None:
        super().step()


def train_wrapped(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    torch.optim.Adam(
        [nn.Parameter(torch.zeros(1))]
    )  # torch hooks the step of a class with its first instance
    model = nn.Linear(4, 4)
    optimizer = make(model)
    for _ in range(2):
        train(model, optimizer)


@pytest.mark.parametrize("make", [Wraps, lambda model: Inherits(model.parameters(), lr=0.1)])
def test_steps_within_a_step_are_one_step(
    record: Record, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    plain = record("plain", lambda: train_wrapped(lambda model: torch.optim.Adam(model.parameters(), lr=0.1)))
    result = compare(plain, record("wrapped", lambda: train_wrapped(make)))
    assert not result.findings
    # Two parameters in two steps, with two moments each.
    numbers = {each.name: each.tensors for each in result.checks}
    assert (numbers["update"], numbers["optimizer state"]) == (4, 8)


def train_partition(factor: float = 1.0) -> None:
    """Train one flat tensor of all parameters, linked to them as DeepSpeed's ZeRO links its partitions."""
    model = nn.Linear(4, 4)
    parameters = list(model.parameters())
    partition = nn.Parameter(torch.cat([each.detach().reshape(-1) for each in parameters] + [torch.zeros(3)]))
    start = 0
    for each in parameters:
        each._hp_mapping = SimpleNamespace(
            hp_fragment=partition.detach().narrow(0, start, each.numel()),
            hp_fragment_address=SimpleNamespace(start=start, numel=each.numel()),
            lp_fragment_address=SimpleNamespace(start=0, numel=each.numel()),
        )
        start += each.numel()
    optimizer = torch.optim.Adam([partition], lr=0.1)
    for _ in range(2):
        model(torch.arange(8.0).reshape(2, 4) / 8).square().mean().backward()
        gradients = [each.grad.reshape(-1) * factor for each in parameters]
        partition.grad = torch.cat([*gradients, torch.zeros(3)])
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for each in parameters:
                each.copy_(each._hp_mapping.hp_fragment.view_as(each))


def train_plainly() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        train(model, optimizer)


def test_parameters_in_a_flat_partition_of_zero_are_compared_by_their_names(record: Record) -> None:
    plain = record("plain", train_plainly)
    result = compare(plain, record("flat", train_partition))
    assert result.verdict == "pass", result.findings
    assert {check.name: check.tensors for check in result.checks}["optimizer state"] == 8
    result = compare(plain, record("wrong", lambda: train_partition(3.0)))
    assert {each.tensor for each in result.findings if each.check == "gradient"} == {"weight", "bias"}


def train_clipped(by_hand: bool) -> None:
    """Clip with a loop of the script; by hand, half of the rows reach the gradients after backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    rows = torch.randn(4, 4)
    for _ in range(2):
        losses = [model(part).square().mean() / 2 for part in rows.split(2)]
        (losses[0] if by_hand else losses[0] + losses[1]).backward()
        if by_hand:
            for each, gradient in zip(parameters, torch.autograd.grad(losses[1], parameters), strict=True):
                each.grad += gradient
        norm = sum(each.grad.square().sum() for each in parameters).sqrt()
        for each in parameters:
            each.grad *= 0.01 / norm
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_that_are_reduced_after_the_backward_pass_are_compared_as_they_are_used(
    record: Record,
) -> None:
    whole = record("whole", lambda: train_clipped(by_hand=False))
    result = compare(whole, record("parts", lambda: train_clipped(by_hand=True)))
    assert result.verdict == "pass", result.findings


def warm_up(step: int) -> float:
    return step / 4  # computed here


def train_with_rates(how: str) -> None:
    """Train with a rate from a scheduler's function, from an assignment, or from the optimizer's constructor."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    if how == "scheduler":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up(max(step, 1)))
    for step in range(2):
        if how == "assigned":
            optimizer.param_groups[0]["lr"] = 0.1 * warm_up(step + 1)  # assigned here
        train(model, optimizer)
        if how == "scheduler":
            schedule.step()


@pytest.mark.parametrize(
    ("how", "line"),
    [("scheduler", "# computed here"), ("assigned", "# assigned here"), ("", "lr=0.1, momentum=0.5")],
)
def test_the_line_that_set_a_learning_rate_is_told(record: Record, how: str, line: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    (number,) = (
        at for at, text in enumerate(lines, 1) if line in text and "pytest" not in text and '"#' not in text
    )
    groups = RecordedRun.read(record("run", lambda: train_with_rates(how))).ranks[0].options
    assert {group.sites["lr"] for group in groups} == {f"{Path(__file__).name}:{number}"}
    assert sys.getprofile() is None


def test_another_learning_rate_is_told_with_both_values_and_lines(record: Record) -> None:
    result = compare(
        record("right", lambda: train_with_rates("")), record("wrong", lambda: train_with_rates("scheduler"))
    )
    finding = next(each for each in result.findings if each.check == "optimizer options")
    facts = finding.facts
    assert isinstance(facts, OptionFacts)
    assert {facts.site, facts.expected_site} != {""}
    assert facts.site != facts.expected_site
    assert describe_cause(finding).endswith(": 0.025 in step 0, in RUN_A 0.1")

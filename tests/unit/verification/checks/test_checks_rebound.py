"""Parameters and buffers that are bound to other tensors during training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.report.words.check import describe_facts
from moeverify.results.checks import Kind
from moeverify.train import loop
from moeverify.train.engine import PlainEngine
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import Watch
from moeverify.verification.checks.rebound import CHECKS, UNSTEADY, BoundAnew, ReboundWatch

MOE = {
    "num_experts": 4,
    "top_k": 2,
    "expert_hidden": 8,
    "score": "sigmoid",
    "selection_bias_rate": 0.01,
}
ADAMW = {"name": "adamw", "lr": 0.01}


class Recorder(Watch[dict[tuple[int, str, str], Tensor]]):
    """An observer that keeps the weights and buffers it is shown."""

    def __init__(self, program: TrainingProgram) -> None:
        self._found: dict[tuple[int, str, str], Tensor] = {}

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        if kind in (Kind.WEIGHT, Kind.BUFFER) and local is not None:
            self._found[step, kind, name] = local.clone()

    def report(self) -> dict[tuple[int, str, str], Tensor]:
        return self._found


@pytest.fixture
def train(train_alone: Callable, make_one_device_case: Callable) -> Callable[..., Any]:
    """Return a function that trains a small MoE on one device under a watch."""
    return lambda watch: train_alone(make_one_device_case(ADAMW, "float64", MOE), watch)


def rebind_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    update = loop.update_selection_bias

    def update_otherwise(moe: Any, program: TrainingProgram, *arguments: Any) -> None:
        for router in program.routers:
            router.module.selection_bias = router.module.selection_bias.clone()
        update(moe, program, *arguments)

    monkeypatch.setattr(loop, "update_selection_bias", update_otherwise)


def rebind_norm(monkeypatch: pytest.MonkeyPatch, *, tells_optimizer: bool = False) -> None:
    """Bind the weight of the last norm to another tensor after step 1."""
    begin = TrainingProgram.keep_bound
    models: list[nn.Module] = []
    monkeypatch.setattr(
        TrainingProgram, "keep_bound", lambda self: (models.append(self.model), begin(self))[1]
    )
    step, number = PlainEngine.step, [0]

    def step_and_rebind(self: PlainEngine) -> None:
        step(self)
        number[0] += 1
        if number[0] % 3 != 2:  # of three steps
            return
        norm: Any = models[-1].get_submodule("norm")
        old = norm.weight
        norm.weight = nn.Parameter(2.0 * old.detach())
        for group in self.optimizer.param_groups if tells_optimizer else ():
            group["params"] = [norm.weight if each is old else each for each in group["params"]]

    monkeypatch.setattr(PlainEngine, "step", step_and_rebind)


def test_buffers_are_read_where_the_modules_have_them(
    train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = train(Recorder)
    rebind_buffers(monkeypatch)
    found = train(Recorder)
    assert any(kind == Kind.BUFFER and bool(values.any()) for (_, kind, _), values in right.items())
    assert right.keys() == found.keys()
    assert all(torch.equal(values, found[key]) for key, values in right.items())


def test_buffers_are_told_where_they_are_saved_alone(
    train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(lambda program: ReboundWatch(program, saves=True)) == []
    rebind_buffers(monkeypatch)
    assert train(ReboundWatch) == []
    found = train(lambda program: ReboundWatch(program, saves=True))
    assert {(each.step, each.kind, each.kept_by) for each in found} == {(0, Kind.BUFFER, ("checkpoint",))}


def test_a_parameter_that_the_optimizer_does_not_have(
    train: Callable, monkeypatch: pytest.MonkeyPatch, run_ranks: Callable
) -> None:
    right = train(Recorder)
    rebind_norm(monkeypatch)
    found = train(Recorder)
    key = (1, Kind.WEIGHT, "norm.weight")
    assert torch.equal(found[key], 2.0 * right[key])
    assert torch.equal(found[2, Kind.WEIGHT, "norm.weight"], found[key]), "nothing trains it"
    report = train(ReboundWatch)
    assert report == [BoundAnew(1, Kind.WEIGHT, "norm.weight", report[0].error, ("optimizer",))]
    assert report[0].error == pytest.approx(0.5)
    outcome = CHECKS[0].judge(run_ranks({0: {}}).shown(), [[], report])
    assert outcome is not None
    (finding,) = outcome.findings
    assert (finding.rank, finding.ranks, outcome.result.verdict) == (1, (1,), "mismatch")
    assert describe_facts(finding.facts, finding).cause == (
        "norm.weight was bound to another tensor in step 1; the optimizer keeps the old one"
    )


def test_a_parameter_that_the_optimizer_is_told_of(train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    rebind_norm(monkeypatch, tells_optimizer=True)
    assert train(ReboundWatch) == []


def test_nothing_is_judged_where_nothing_was_bound_anew(run_ranks: Callable) -> None:
    assert CHECKS[0].judge(run_ranks({0: {}}).shown(), [[], []]) is None


class Stored(nn.Linear):
    """A layer that rounds its own weight to `kept` before it computes."""

    def __init__(self, kept: torch.dtype | None) -> None:
        super().__init__(4, 4, bias=False, dtype=torch.float64)
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            self.weight.data.copy_(self.weight.to(self.kept))
        return super().forward(x)


@pytest.mark.parametrize("kept", [None, torch.float32, torch.bfloat16])
def test_weights_that_a_pass_rounds_are_told_with_their_dtype(
    kept: torch.dtype | None, run_ranks: Callable
) -> None:
    model = Stored(kept)
    shard = LocalShard("weight", model.weight, Region.whole((4, 4)))
    program: Any = SimpleNamespace(
        model=model, custom_step=None, live_shards=lambda: [shard], find_rebound=list, engine=None
    )
    watch = ReboundWatch(program, compares=True)
    watch.observe(-1, Kind.INITIAL_WEIGHT, "empty", torch.empty(0, 4), Region.whole((0, 4)))  # of few rows
    watch.observe(-1, Kind.INITIAL_WEIGHT, shard.name, shard.local(), shard.region)
    for step in range(2):
        watch.begin_step(step)
        program.model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        watch.observe(step, Kind.GRADIENT, shard.name, shard.tensor.grad, shard.region)
        with torch.no_grad():
            shard.tensor.sub_(0.1 * shard.tensor.grad)
        watch.observe(step, Kind.WEIGHT, shard.name, shard.local(), shard.region)
    found = watch.report()
    if kept is None:
        assert found == []
        return
    narrow = str(kept).removeprefix("torch.")
    [each] = found
    assert (each.step, each.name, each.kept_by, each.rounded_to) == (0, "weight", (), narrow)
    shown = run_ranks({0: {}, 1: {}}).shown()
    outcome = CHECKS[0].judge(shown, [found, []])
    assert outcome is not None
    [finding] = outcome.findings
    cause = describe_facts(finding.facts, finding).cause
    assert cause == f"weight was rounded to {narrow} outside of the optimizer step"
    use, part = UNSTEADY
    known = replace(shown, dtypes={(use, "weight", part): ""})
    assert CHECKS[0].judge(known, [found, []]) is None, "one device rounds it too"

"""The guard on scripts with floating-point inputs, frozen layers and optimizers that step others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from moeverify.results.guard import GuardCheck
from moeverify.results.script import MemberFacts, ScriptCheck
from moeverify.scripts.guard.exchange import Inbox
from moeverify.scripts.guard.guard import Guard
from moeverify.scripts.guard.judge import Judge
from moeverify.scripts.guard.lines import StepRecord
from moeverify.scripts.guard.settings import GuardSettings
from moeverify.train.calls.hooks import install

pytestmark = pytest.mark.slow

NUM_STEPS = 4


class Crops(nn.Module):
    """A model that gets a list of tensors."""

    def __init__(self, *, detaches: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.detaches = detaches

    def forward(self, crops: list[Tensor]) -> Tensor:
        hidden = self.body(torch.cat(crops))
        output: Tensor = self.head(hidden.detach() if self.detaches else hidden)
        return output


class Loose(Crops):
    """A model with parameters and layers in containers that torch does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {"first": nn.Parameter(torch.ones(8))}
        self.layers = [nn.Linear(8, 8, bias=False)]

    def forward(self, crops: list[Tensor]) -> Tensor:
        output: Tensor = self.layers[0](super().forward(crops)) * self.scales["first"]
        return output


class Wraps(Optimizer):
    """An optimizer that steps another one, as ZeroRedundancyOptimizer does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.inner = Adam(self.param_groups, lr=0.1)

    def step(self, closure: object = None) -> None:
        self.inner.step()


def make_adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.1)


def train(
    out: Path,
    model: Crops,
    make: Callable[[nn.Module], Optimizer] = make_adam,
    after_backward: Callable[[], object] = lambda: None,
) -> list[StepRecord]:
    guard = Guard(GuardSettings(out=out), 0, 1)
    hooks = install(guard)
    try:
        criterion, optimizer = nn.MSELoss(), make(model)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            output = model([torch.rand(2, 8), torch.rand(3, 8)])
            criterion(output, output.detach() + 1.0).backward()
            after_backward()
            optimizer.step()
        guard.close()
    finally:
        hooks.remove()
    return [taken[0] for taken in Inbox(out).take(is_over=True)]


def list_checks(records: list[StepRecord]) -> list[str]:
    return [finding.check for record in records for finding in record.findings]


def test_rows_are_those_of_the_models_first_tensor(tmp_path: Path) -> None:
    records = train(tmp_path, Crops())
    assert [[len(rows) for rows in record.rows] for record in records] == [[2]] * NUM_STEPS
    assert len({row for record in records for rows in record.rows for row in rows}) == 2 * NUM_STEPS


def test_a_layer_whose_gradients_the_script_drops_is_frozen_and_not_detached(tmp_path: Path) -> None:
    model = Crops()
    assert not list_checks(train(tmp_path / "frozen", model, after_backward=model.head.zero_grad))
    assert list_checks(train(tmp_path / "detached", Crops(detaches=True))) == [ScriptCheck.PARAMETERS]


def test_parameters_outside_of_models_and_optimizers_are_found(tmp_path: Path) -> None:
    model = Loose()
    records = train(tmp_path / "forgotten", model)
    (finding,) = [finding for record in records for finding in record.findings]
    assert isinstance(finding.facts, MemberFacts)
    assert finding.facts.which == "missing"
    assert (finding.tensor, *finding.facts.others) == ("layers.0.weight", "scales.first")
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    call = next(number for number, line in lines if "self.layers[0](" in line)
    assert [each.site for each in finding.sites] == [f"test_guard_inputs.py:{call}"]


def test_parameters_that_a_script_updates_or_no_longer_uses_are_not_forgotten(tmp_path: Path) -> None:
    model = Loose()
    loose = [model.scales["first"], model.layers[0].weight]

    def update() -> None:
        with torch.no_grad():
            torch._foreach_sub_(loose, [0.1 * each.grad for each in loose if each.grad is not None])

    assert not list_checks(train(tmp_path / "updated", model, after_backward=update))
    later = Adam(loose, lr=0.1)  # steps less often than the other optimizer
    assert not list_checks(train(tmp_path / "known", model))
    del later
    loose[1].grad = None
    loose[0].untyped_storage().resize_(0)  # as FSDP frees the parameters that it had gathered
    records = train(tmp_path / "freed", Crops())
    assert (len(records), list_checks(records)) == (NUM_STEPS, [])
    assert loose[0].grad is not None  # still there, beside another model
    assert not list_checks(train(tmp_path / "unused", Crops()))


def test_updates_of_an_optimizer_that_another_one_steps_are_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = train(tmp_path / "right", Crops(), Wraps)
    assert not list_checks(records)
    assert not any(record.unjudged for record in records)
    step = Adam.step

    def decay(self: Adam, closure: Any = None) -> None:
        step(self)
        with torch.no_grad():
            torch._foreach_mul_(self.param_groups[0]["params"], 0.5)

    monkeypatch.setattr(Adam, "step", Optimizer.profile_hook_step(decay))
    found = list_checks(train(tmp_path / "wrong", Crops(), Wraps))
    assert set(found) == {GuardCheck.UPDATE}


def test_unseen_inputs_are_mentioned_until_some_are_seen() -> None:
    rows = [{}, {"rows": [[1]]}, {}]
    records = [StepRecord.model_validate({"step": step, "rank": 0, **each}) for step, each in enumerate(rows)]
    judge = Judge(Path())
    seen = []
    for record in records:
        judge._note_rows([record])
        seen.append(bool(judge.unjudged))
    assert seen == [True, False, False]

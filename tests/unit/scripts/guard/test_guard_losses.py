"""The guard looks for NaN losses in every step, and synchronizes with the device at the start of the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moeverify.scripts.guard.guard import Guard
from moeverify.scripts.guard.judge import Judge
from moeverify.scripts.guard.settings import GuardSettings
from moeverify.train.calls.hooks import install

pytestmark = pytest.mark.slow

MICRO_BATCHES = 3


class Reads(TorchDispatchMode):
    """A counter of reads of tensor values, for which the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, values=(), named=None):  # type: ignore[no-untyped-def]
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*values, **(named or {}))


class Script:
    """A model with a guard, and its optimizer."""

    def __init__(self, out: Path) -> None:
        torch.manual_seed(0)
        self.out = out
        self.guard = Guard(GuardSettings(out=out, every=16), 0, 1)
        self.hooks = install(self.guard)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def accumulate(self, factor: Tensor | float = 1.0) -> None:
        for _ in range(MICRO_BATCHES):
            (self.model(torch.ones(2, 4)).square().mean() * factor).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    yield script
    script.guard.close()
    script.hooks.remove()


def test_no_loss_is_read_between_the_micro_batches_of_a_step_that_is_not_sampled(script: Script) -> None:
    while script.guard.settings.samples(script.guard.step) or script.guard.step < 8:
        script.accumulate()
        script.step()
    script.accumulate()  # begins the step, and reads the losses of the previous one
    assert not script.guard.is_sampled
    with Reads() as reads:
        script.accumulate()
        script.step()
    assert reads.count == 0


@pytest.mark.parametrize("at", [1, 9])  # a sampled step and one between samples
def test_a_loss_that_is_no_number_is_found_where_no_module_is_to_blame(script: Script, at: int) -> None:
    for number in range(11):
        script.accumulate(float("inf") if number == at else 1.0)
        if number != at:  # later steps must not be bad too
            script.step()
        else:
            script.optimizer.zero_grad()
            script.optimizer.step()
    script.guard.close()
    judge = Judge(script.out)
    found = [finding for finding in judge.look(is_over=True) if finding.facts is not None]
    bad = [each for each in found if each.facts is not None and each.facts.about == "nonfinite"]
    assert [(each.step, each.tensor) for each in bad] == [(at, "loss")]
    judge.remove()

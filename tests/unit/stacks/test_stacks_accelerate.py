"""The adapter of accelerate on one rank: norm, clip, backward and step are the framework's."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeverify.cases.schema import Optimizer
from moeverify.errors import CaseError
from moeverify.stacks import accelerate
from moeverify.stacks.environment import kept_environment
from moeverify.stacks.loop import FrameworkLoop


def make_engine() -> tuple[FrameworkLoop, nn.Linear, list[float]]:
    """Return a loop that halves each loss, as for two accumulation steps, its model and its clips."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    limits: list[float] = []

    def clip_by_norm(limit: float) -> Tensor:
        limits.append(limit)
        return nn.utils.clip_grad_norm_(model.parameters(), limit)

    loop = FrameworkLoop(optimizer, optimizer, lambda loss: (loss / 2).backward(), clip_by_norm)
    return loop, model, limits


def test_the_norm_is_measured_without_a_change_and_the_clip_by_the_same_formula() -> None:
    engine, model, limits = make_engine()
    assert engine.norm() is None
    assert engine.begin(Optimizer(name="sgd", lr=1.0, clip_norm=1.0), [], "foreach") is engine.optimizer
    engine.backward(model.weight.square().sum())  # halved: the gradient is the weight itself, of norm 5
    norm = engine.norm()
    assert norm is not None
    torch.testing.assert_close(norm, torch.tensor(5.0, dtype=torch.float64))
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, model.weight.detach())
    coefficient = engine.clip([], norm, 1.0)
    torch.testing.assert_close(coefficient, torch.tensor(1 / (5.0 + 1e-6), dtype=torch.float64))
    torch.testing.assert_close(model.weight.grad, model.weight.detach() * coefficient)
    assert limits == [torch.inf, 1.0]


def test_the_step_is_that_of_the_prepared_optimizer() -> None:
    engine, model, _ = make_engine()
    engine.backward(model.weight.square().sum())
    engine.step()
    torch.testing.assert_close(model.weight.detach(), torch.zeros(1, 2, dtype=torch.float64))
    engine.zero_grad()
    assert model.weight.grad is None


def test_what_accelerate_cannot_divide_is_refused_together() -> None:
    pytest.importorskip("accelerate")
    sizes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    mesh: Any = {axis: SimpleNamespace(size=lambda size=size: size) for axis, size in sizes.items()}
    with pytest.raises(CaseError) as error:
        accelerate.parallelize(nn.Linear(2, 2), mesh, make_optimizer=lambda model: None, no_such_field=1)  # type: ignore[arg-type,return-value]
    found = {problem.path: str(problem) for problem in error.value.problems}
    assert set(found) == {"layout.tp", "layout.arguments.no_such_field", "layout.arguments"}
    assert "it has" in found["layout.arguments.no_such_field"]


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    with kept_environment():
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        os.environ["FSDP_VERSION"] = "2"
    assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["FSDP_VERSION"] == "1"

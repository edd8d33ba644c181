"""The adapters of Lightning and DeepSpeed: what they refuse, and where DeepSpeed gets its clip; neither is installed.

Their runs with ranks are `make stacks`: each needs an environment of its own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moeverify.case.schema import Optimizer
from moeverify.errors import CaseError
from moeverify.stacks import deepspeed, lightning
from moeverify.stacks.deepspeed import DeepSpeedLoop


def make_mesh(**sizes: int) -> Any:
    axes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1} | sizes
    return {axis: SimpleNamespace(size=lambda size=size: size) for axis, size in axes.items()}


def find_problems(error: pytest.ExceptionInfo[CaseError]) -> dict[str, str]:
    return {problem.path or "": str(problem) for problem in error.value.problems}


def no_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    raise AssertionError("what is refused makes no optimizer")


def test_deepspeed_refuses_axes_stages_and_precisions_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "import_framework", lambda *_, **__: None)
    model = nn.Linear(2, 2, dtype=torch.float64)
    with pytest.raises(CaseError) as error:
        deepspeed.parallelize(model, make_mesh(tp=2), make_optimizer=no_optimizer, stage=3)
    found = find_problems(error)
    assert set(found) == {"layout.tp", "layout.arguments.stage", "recipe.precision"}
    assert "write precision: float32" in found["recipe.precision"]


def test_lightning_refuses_what_its_strategies_do_not_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "import_framework", lambda *_, **__: None)
    mesh = make_mesh(cp=2, dp_replicate=2, dp_shard=2)
    with pytest.raises(CaseError) as error:
        lightning.parallelize(nn.Linear(2, 2), mesh, make_optimizer=no_optimizer)
    assert set(find_problems(error)) == {"layout.cp", "layout.dp_replicate"}


@pytest.mark.parametrize("adapter", [deepspeed, lightning])
def test_a_framework_that_is_not_installed_is_named(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = adapter.__name__.rpartition(".")[2]
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(CaseError) as error:
        adapter.parallelize(nn.Linear(2, 2), make_mesh(), make_optimizer=no_optimizer)
    assert f"`{name}` cannot be imported" in find_problems(error)["layout.parallelize"]


@pytest.mark.parametrize("stage", [0, 2])
def test_the_clip_of_the_recipe_is_given_to_the_engine(stage: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = SimpleNamespace(
        _config=SimpleNamespace(gradient_clipping=0.0), optimizer=SimpleNamespace(clip_grad=0.0)
    )
    loop = DeepSpeedLoop(engine, optimizer, stage)
    assert loop.begin(Optimizer(name="sgd", lr=1.0, clip_norm=0.5), [], "foreach") is optimizer
    assert engine._config.gradient_clipping == 0.5
    assert engine.optimizer.clip_grad == (0.5 if stage else 0.0)
    # 1e-6 as in DeepSpeed's `unscale_and_clip_grads`
    coefficient = loop.clip([], torch.tensor(2.0), 0.5)
    torch.testing.assert_close(coefficient, torch.tensor(0.5 / (2.0 + 1e-6)))

"""Adapters of frameworks that are not installed here: their refusals and their own changes.

Their runs with ranks are `make stacks`: each needs a separate environment.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moeverify.cases.schema import Optimizer
from moeverify.errors import CaseError
from moeverify.stacks import deepspeed, lightning, megatron, torchtitan
from moeverify.stacks.deepspeed_loop import DeepSpeedLoop
from moeverify.stacks.kept_precision import KeptPrecision


@dataclass
class ParallelismOfTorchtitan:
    """The fields of torchtitan's ParallelismConfig that a case may name."""

    spmd_backend: str = "spmd_types"
    expert_parallel_degree: int = 1


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
        deepspeed.parallelize(model, make_mesh(tp=2), make_optimizer=no_optimizer, stage=4)
    found = find_problems(error)
    assert set(found) == {"layout.tp", "layout.arguments.stage", "recipe.precision"}
    assert "write precision: float32" in found["recipe.precision"]


def test_lightning_refuses_what_its_strategies_do_not_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "import_framework", lambda *_, **__: None)
    mesh = make_mesh(cp=2, dp_replicate=2, dp_shard=2)
    with pytest.raises(CaseError) as error:
        lightning.parallelize(nn.Linear(2, 2), mesh, make_optimizer=no_optimizer)
    assert set(find_problems(error)) == {"layout.cp", "layout.dp_replicate"}


@pytest.mark.parametrize("adapter", [deepspeed, lightning, torchtitan])
def test_a_framework_that_is_not_installed_is_named(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = adapter.__name__.rpartition(".")[2]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CaseError) as error:
        adapter.parallelize(nn.Linear(2, 2), make_mesh(), make_optimizer=no_optimizer)
    assert f"`{name}` cannot be imported" in find_problems(error)["layout.parallelize"]


def test_megatron_is_named_as_pip_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(CaseError) as error:
        megatron.parallelize(nn.Linear(2, 2), make_mesh(), make_optimizer=no_optimizer)
    found = find_problems(error)["layout.parallelize"]
    assert "`megatron.core` cannot be imported" in found
    assert 'pip install "megatron-core>=' in found


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


def test_conversions_that_round_do_nothing_in_wide_precision() -> None:
    rows = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    experts = torch.randn(2, 8, 4, dtype=torch.float64)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    with KeptPrecision():
        product = torch._grouped_mm(rows.bfloat16(), experts.bfloat16(), offs=offsets)
        product.float().sum().backward()
    expected = torch.cat([rows[:2] @ experts[0], rows[2:] @ experts[1]])
    torch.testing.assert_close(product, expected)
    assert rows.grad is not None
    assert rows.half().bfloat16().dtype == torch.bfloat16


def test_torchtitan_refuses_a_model_that_has_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(ParallelismConfig=ParallelismOfTorchtitan)
    monkeypatch.setitem(sys.modules, "torchtitan", SimpleNamespace(config=config))
    monkeypatch.setitem(sys.modules, "torchtitan.config", config)
    arguments = {"spmd_backend": "full_dtensor", "expert_parallel_degre": 2}
    with pytest.raises(CaseError) as error:
        torchtitan._refuse(nn.Linear(2, 2), make_mesh(cp=2), arguments)
    assert set(find_problems(error)) == {
        "layout.arguments.expert_parallel_degre",
        "layout.cp",
        "layout.arguments.spmd_backend",
        "layout.parallelize",
    }

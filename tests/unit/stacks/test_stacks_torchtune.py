"""The adapter of torchtune without torchtune: its refusals. Its runs with ranks are `make stacks`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moeverify.errors import CaseError
from moeverify.stacks import torchtune

PLAN = "layout.arguments.tensor_parallel_plan"


class Decoder(nn.Linear):
    """A decoder of torchtune, as far as its adapter looks."""


def make_mesh(**sizes: int) -> Any:
    axes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1} | sizes
    return {axis: SimpleNamespace(size=lambda size=size: size) for axis, size in axes.items()}


def no_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    raise AssertionError("a refused layout makes no optimizer")


def refuse_heads(model: nn.Module, mesh: Any) -> nn.Module:
    raise ValueError("Number of attention heads (3) must be divisible by tensor parallel size (2).")


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("torchtune")
    package.__version__ = "0.6.1"
    package.training = SimpleNamespace(prepare_mha_for_tp=refuse_heads)
    monkeypatch.setitem(sys.modules, "torchtune", package)
    monkeypatch.setitem(sys.modules, "torchtune.modules", SimpleNamespace(TransformerDecoder=Decoder))


def list_problems(model: nn.Module, mesh: Any, **arguments: Any) -> dict[str, str]:
    with pytest.raises(CaseError) as error:
        torchtune.parallelize(model, mesh, make_optimizer=no_optimizer, **arguments)
    return {each.path or "": str(each) for each in error.value.problems}


@pytest.mark.usefixtures("_installed")
def test_models_axes_and_a_plan_that_is_missing_are_refused_together() -> None:
    found = list_problems(nn.Linear(2, 2), make_mesh(tp=2, cp=2, dp_replicate=2))
    assert set(found) == {"layout.cp", "layout.dp_replicate", "layout.parallelize", PLAN}
    assert "base_llama_tp_plan" in found[PLAN]


@pytest.mark.usefixtures("_installed")
def test_heads_that_cannot_be_divided_are_refused_in_torchtunes_words() -> None:
    found = list_problems(Decoder(2, 2), make_mesh(tp=2), tensor_parallel_plan="builtins:dict")
    assert "attention heads (3) must be divisible" in found["layout.tp"]


def test_it_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtune", None)
    found = list_problems(nn.Linear(2, 2), make_mesh())
    assert 'pip install "torchtune>=0.6.0"' in found["layout.parallelize"]

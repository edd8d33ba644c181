"""The adapter of Modalities: its refusals. Its runs with ranks are `make stacks`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moeverify.errors import CaseError
from moeverify.stacks import modalities


def make_mesh(**sizes: int) -> Any:
    axes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1} | sizes
    return {axis: SimpleNamespace(size=lambda size=size: size) for axis, size in axes.items()}


def no_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    raise AssertionError("a refused layout makes no optimizer")


def list_problems(error: pytest.ExceptionInfo[CaseError]) -> dict[str, str]:
    return {each.path or "": str(each) for each in error.value.problems}


def test_it_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modalities", None)
    with pytest.raises(CaseError) as error:
        modalities.parallelize(nn.Linear(2, 2), make_mesh(), make_optimizer=no_optimizer)
    assert 'pip install "modalities>=0.5.0"' in list_problems(error)["layout.parallelize"]
    with pytest.raises(CaseError) as error:
        modalities.make()
    assert set(list_problems(error)) == {"recipe.model.factory"}


@pytest.mark.filterwarnings("ignore")  # of its imports
def test_fields_axes_and_models_of_others_are_refused() -> None:
    pytest.importorskip("modalities")
    with pytest.raises(CaseError) as error:
        modalities.make(n_layer=0)
    assert "Modalities refuses the model" in list_problems(error)["recipe.model.arguments"]
    with pytest.raises(CaseError) as error:
        modalities.parallelize(nn.Linear(2, 2), make_mesh(cp=2), make_optimizer=no_optimizer)
    assert set(list_problems(error)) == {"layout.cp", "layout.parallelize"}

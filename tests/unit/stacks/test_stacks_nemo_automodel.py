"""The adapter of NeMo Automodel: its refusals. Its runs with ranks are `make stacks`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moeverify.errors import CaseError
from moeverify.stacks import nemo_automodel


def make_mesh(**sizes: int) -> Any:
    axes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1} | sizes
    return {axis: SimpleNamespace(size=lambda size=size: size) for axis, size in axes.items()}


def no_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    raise AssertionError("a refused layout makes no optimizer")


def test_it_is_named_as_pip_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_automodel", None)
    with pytest.raises(CaseError, match=r'pip install "nemo-automodel>=0\.7\.0"'):
        nemo_automodel.parallelize(nn.Linear(2, 2), make_mesh(), make_optimizer=no_optimizer)
    with pytest.raises(CaseError, match=r"recipe\.model\.factory"):
        nemo_automodel.make("qwen3_moe")


@pytest.mark.filterwarnings("ignore")  # of its imports
def test_families_axes_and_arguments_that_there_are_not_are_refused() -> None:
    pytest.importorskip("nemo_automodel")
    with pytest.raises(CaseError, match="no causal language models of the family `no_such_family`"):
        nemo_automodel.make("no_such_family")
    with pytest.raises(CaseError) as error:
        nemo_automodel.parallelize(
            nn.Linear(2, 2), make_mesh(cp=2), make_optimizer=no_optimizer, no_such_field=1
        )
    assert {each.path for each in error.value.problems} == {"layout.cp", "layout.arguments.no_such_field"}

"""Numbers of a training state that a load must restore: every numeric option of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeverify.faults.setting import make_case
from moeverify.train.assemble import assemble_single
from moeverify.train.state import TrainingState


@pytest.mark.parametrize(
    ("optimizer", "option", "value", "names"),
    [
        ("adamw", "betas", (0.95, 0.9), {"betas 0", "betas 1"}),
        ("adamw", "betas", (0.9, 0.96), {"betas 1"}),
        ("adamw", "eps", 1e-5, {"eps"}),
        ("adamw", "weight_decay", 0.3, {"weight_decay"}),
        ("sgd", "momentum", 0.8, {"momentum"}),
        ("sgd", "dampening", 0.1, {"dampening"}),
        ("sgd", "nesterov", True, {"nesterov"}),
    ],
)
def test_an_option_that_changes_is_a_fact_that_changes(
    optimizer: str, option: str, value: Any, names: set[str]
) -> None:
    recipe = make_case("numbers", preset="tiny-gpt", optimizer=optimizer).recipe
    state = TrainingState.begin(recipe, assemble_single(recipe, torch.device("cpu")))
    before = state.numbers()
    group = state.optimizer.param_groups[0]
    group[option] = value
    after = state.numbers()
    changed = {name for name, number in after.items() if before[name] != number}
    assert {name.partition(": ")[2] for name in changed} == names
    assert len(changed) == len(names) * len(group["params"])


def test_how_a_step_is_computed_is_no_fact() -> None:
    recipe = make_case("numbers", preset="tiny-gpt", optimizer="adamw").recipe
    state = TrainingState.begin(recipe, assemble_single(recipe, torch.device("cpu")))
    kept = {name.partition(": ")[2] for name in state.numbers()}
    assert not kept & {"foreach", "fused", "capturable", "differentiable"}

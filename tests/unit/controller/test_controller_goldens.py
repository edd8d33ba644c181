"""How a golden that was just computed stands to those in git."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeverify.controller.goldens import GoldenSet
from moeverify.controller.options import RunOptions
from moeverify.golden.file import GoldenFile, golden_path, write_golden
from moeverify.validation.load import load_cases

CASE = Path(__file__).parents[3] / "cases" / "ddp.yaml"
LOSSES = {"0/loss/lm": 2.0}
TENSORS = {"0/gradient/x": [4.0, 1.0, -1.0], "0/routing/r": "an-exact-hash"}


@pytest.fixture
def goldens(tmp_path: Path) -> GoldenSet:
    return GoldenSet.of(load_cases([CASE]), RunOptions(device="cuda", golden_folder=tmp_path))


def record(goldens: GoldenSet, device_class: str, **changes: Any) -> None:
    recipe = goldens.recipes[0]
    fields = {"name": recipe.name, "recipe": recipe.fingerprint(), "device_class": device_class}
    path = golden_path(goldens.options.golden_folder, recipe.name, device_class)
    write_golden(path, GoldenFile(**{**fields, "losses": LOSSES, "tensors": TENSORS, **changes}))


def examine(goldens: GoldenSet, off: float = 0.0, **tensors: Any) -> Any:
    summary = {"losses": LOSSES, "tensors": {**TENSORS, "0/gradient/x": [4.0 + off, 1.0, -1.0], **tensors}}
    return goldens.examine(goldens.recipes[0], {"summary": summary}, "a-gpu")


def test_a_gpus_golden_near_that_of_a_cpu_is_said_to_be(goldens: GoldenSet) -> None:
    record(goldens, "cpu")
    state = examine(goldens, off=4e-13)
    assert state.status == "missing"
    assert "the golden of a-gpu is within 1.0e-13 of" in state.nearness
    record(goldens, "a-gpu")
    assert examine(goldens, off=4e-13).status == "recorded"


@pytest.mark.parametrize("wrong", [{"off": 4e-9}, {"0/routing/r": "another-hash"}])
def test_a_gpus_golden_far_from_that_of_a_cpu_is_an_error(goldens: GoldenSet, wrong: dict[str, Any]) -> None:
    record(goldens, "cpu")
    record(goldens, "a-gpu", tensors={**TENSORS, "0/gradient/x": [4.0 + wrong.get("off", 0.0), 1.0, -1.0]})
    state = examine(goldens, **wrong)
    assert state.status == "differs"
    assert "off by" in state.message


def test_a_golden_of_another_recipe_says_nothing_of_nearness(goldens: GoldenSet) -> None:
    record(goldens, "cpu", recipe="another")
    assert examine(goldens).nearness == ""
    assert examine(goldens).status == "missing"

"""Planted bugs as data: each has its lines, its ground truth and a case that moeverify accepts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moeverify.cases.validation.load import load_cases

pytestmark = pytest.mark.slow

loader: Any = import_module("loader")
run: ModuleType = import_module("run")


@pytest.fixture(scope="module")
def plants() -> Sequence[Any]:
    """Return all plants. Reading them takes seconds, which workers without these tests save."""
    found: Sequence[Any] = loader.load_plants()
    return found


@pytest.fixture(scope="module")
def bugs(plants: Sequence[Any]) -> Sequence[Any]:
    """Return the plants that are no clean cases."""
    return [plant for plant in plants if not plant.is_clean]


def test_each_plant_has_lines_and_a_truth(bugs: Sequence[Any]) -> None:
    for plant in bugs:
        assert plant.truth.lines, plant.id
        assert plant.truth.says.endswith("."), plant.id
        folder = loader.PLANTS if plant.stack == loader.BUILTIN else loader.STACKS
        for line in plant.truth.lines:
            text = (folder / line.file).read_text().splitlines()[line.first - 1 : line.last]
            assert any(plant.id in row.split("plant:")[-1].split() for row in text), (plant.id, line)


def test_each_stack_has_clean_cases(plants: Sequence[Any]) -> None:
    for stack in loader.list_stacks():
        assert [plant for plant in plants if plant.stack == stack and plant.is_clean]


def test_about_a_third_is_held_out_by_lot(bugs: Sequence[Any]) -> None:
    for plant in bugs:
        assert plant.held == loader.is_drawn(plant.id), plant.id
    assert 0.2 < sum(plant.held for plant in bugs) / len(bugs) < 0.45


def test_cases_are_valid(plants: Sequence[Any], tmp_path: Path) -> None:
    for precision in sorted({precision for plant in plants for precision in plant.precisions}):
        chosen = [plant for plant in plants if plant.way != "watch" and precision in plant.precisions]
        run.copy_recipes(chosen, tmp_path)
        files = [run.write_case(plant, tmp_path / "cases" / plant.stack) for plant in chosen]
        cases = load_cases(files, overrides=[f"recipe.precision={precision}"])
        assert [case.name for case in cases] == [plant.id for plant in chosen]


STACK = """\
def reduce(x, mode):
    if mode == "p1":
        y = x.sum(
            0
        )  # plant: p1 p2
    return x


def finish(model):
    if model:
        step(model)


z = 1  # a note; plant: p4
"""


def write_stack(folder: Path, text: str = STACK) -> Path:
    (folder / "mine").mkdir()
    (folder / "mine" / "code.py").write_text(text)
    return folder / "mine"


def test_a_marker_stands_for_its_statement(tmp_path: Path) -> None:
    found = loader.find_markers(write_stack(tmp_path))
    assert {
        name: [(line.file, line.first, line.last) for line in lines] for name, lines in found.items()
    } == {
        "p1": [("mine/code.py", 3, 5)],
        "p2": [("mine/code.py", 3, 5)],
        "p4": [("mine/code.py", 14, 14)],
    }


def test_a_marked_head_of_a_function_is_all_of_it_where_something_is_missing(tmp_path: Path) -> None:
    text = STACK.replace("def finish(model):", "def finish(model):  # plant: p3")
    (line,) = loader.find_markers(write_stack(tmp_path, text))["p3"]
    truth = {"kind": "loop", "says": "It is missing.", "tensors": ["*"]}
    assert loader._read_truth("p3", truth, [line], {}, ()).lines == (loader.Line("mine/code.py", 9, 9),)
    whole = loader._read_truth("p3", truth | {"omission": True}, [line], {}, ()).lines
    assert whole == (loader.Line("mine/code.py", 9, 11),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "odd"}, "are no kinds"),
        ({"says": ""}, "says nothing"),
        ({"tensors": []}, "no tensors"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_truth_that_is_not_complete_is_refused(change: dict[str, Any], words: str) -> None:
    truth = {"kind": "edit", "says": "Wrong.", "tensors": ["*"]} | change
    with pytest.raises(loader.PlantError, match=words):
        loader._read_truth("p1", truth, [loader.Line("a.py", 1, 1)], {}, ())


def test_anchors_are_counterparts(tmp_path: Path) -> None:
    anchors = loader.find_markers(write_stack(tmp_path, "x = (\n    1\n)  # anchor: one two\n"), anchors=True)
    line = loader.Line("mine/code.py", 9, 9)
    truth = {"kind": "edit", "says": "Wrong.", "tensors": ["*"], "anchors": ["two"]}
    assert loader._read_truth("p1", truth, [line], anchors, ()).counterparts == (
        loader.Line("mine/code.py", 1, 3),
    )
    with pytest.raises(loader.PlantError, match="no anchors three"):
        loader._read_truth("p1", truth | {"anchors": ["three"]}, [line], anchors, ())


def test_a_plant_without_a_marker_is_refused() -> None:
    with pytest.raises(loader.PlantError, match="no line of the source"):
        loader._read_truth("p1", {"kind": "edit", "says": "Wrong.", "tensors": ["*"]}, [], {}, ())


def test_lines_are_known_by_the_end_of_their_path() -> None:
    line = loader.Line("mine/code.py", 3, 5)
    assert line.covers("/home/me/mine/code.py", 4)
    assert line.covers("code.py", 3)
    assert not line.covers("other/code.py", 4)
    assert not line.covers("mine/code.py", 6)

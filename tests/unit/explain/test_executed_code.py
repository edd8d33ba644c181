"""Code of a small script that a rank and one device execute, with the lines that are named for a wrong result."""

from __future__ import annotations

import linecache
import runpy
from pathlib import Path

import pytest

from moeverify.explain.executed_code import ExecutedCode
from moeverify.explain.lines import Lines
from moeverify.explain.program import Executed
from moeverify.results.culprit import Origin

SCRIPT = """
def draw(seed, epoch):
    base = 0 if BUG == "epoch" else epoch
    if BUG == "branch":
        base += 7
    return list(range(seed + base, seed + base + 4))

def load(state):
    if BUG != "unloaded":
        state["count"] = 5
    return state

SIZE = 4 if BUG != "size" else 4.5
SEED = 3
state = {}
for step in range(4):
    lines.begin(step)
    if RANKS > 1:
        shared = RANKS * step
    rows = draw(SEED, step // 2)
    if BUG == "rows":
        rows = rows[::-1]
    scaled = [row * SIZE for row in rows]
    if step == 2:
        state = load(state)
"""


def execute(path: Path, ranks: int, bug: str = "", most: int | None = None) -> Executed:
    """Return the code of the script; it begins its steps itself."""
    executed = Executed()
    lines = Lines(executed, most)
    with lines.following():
        runpy.run_path(str(path), {"BUG": bug, "RANKS": ranks, "lines": lines})
    return executed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    linecache.checkcache()
    return file


def find(path: Path, bug: str, step: int, text: str, most: int | None = None) -> list[Origin]:
    """Return the lines that are named for a wrong result of the line with a text."""
    line = 1 + next(number for number, each in enumerate(SCRIPT.splitlines()) if text in each)
    code = ExecutedCode([execute(path, 2, bug, most)], execute(path, 1, most=most), step)
    return list(code.find([(str(path), line)]))


def test_the_line_that_makes_another_value_is_named_with_both_values(path: Path) -> None:
    (origin,) = find(path, "epoch", 2, "rows = draw")
    assert (origin.kind, origin.here, origin.there) == ("definition", "0", "1")
    assert origin.line.expression == '0 if BUG == "epoch" else epoch'


def test_a_value_that_differed_in_a_right_step_is_harmless(path: Path) -> None:
    assert find(path, "", 2, "shared = RANKS") == []


def test_names_of_a_script_outside_of_functions_are_followed(path: Path) -> None:
    (origin,) = find(path, "size", 0, "scaled =")
    assert (origin.line.expression, origin.here, origin.there) == ('4 if BUG != "size" else 4.5', "4.5", "4")


def test_a_line_of_ranks_alone_is_named_in_a_function_that_the_call_uses(path: Path) -> None:
    (origin,) = [each for each in find(path, "branch", 0, "rows = draw") if each.kind == "branch"]
    assert origin.line.expression == "base += 7"


def test_a_line_that_assigns_the_same_name_again_is_named(path: Path) -> None:
    (origin,) = find(path, "rows", 0, "rows = draw")
    assert (origin.kind, origin.line.expression) == ("branch", "rows = rows[::-1]")


def test_a_line_that_ranks_leave_out_is_named_in_its_step(path: Path) -> None:
    (origin,) = find(path, "unloaded", 2, "scaled =")
    assert (origin.kind, origin.line.expression) == ("skipped", 'BUG != "unloaded"')
    assert find(path, "unloaded", 1, "scaled =") == []


def test_right_ranks_have_no_such_line(path: Path) -> None:
    assert [find(path, "", step, "rows = draw") for step in range(4)] == [[], [], [], []]


def test_a_function_that_is_followed_only_in_part_is_left_out(path: Path) -> None:
    executed = execute(path, 2, "branch", most=3)
    first = 1 + SCRIPT.splitlines().index("def draw(seed, epoch):")
    assert {span[1] for span in executed.skipped} >= {first}
    assert [each for each in find(path, "branch", 0, "rows = draw", most=3) if each.kind == "branch"] == []

"""Arms of conditions and loops that one side alone executes, by the lines that both sides have executed."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from moeverify.explain.left_out import list_idle, list_left_out

CODE = """
def run(x, small):
    if small:
        x = x + 1
    if small:
        x = x + 2
    else:
        x = x + 3
    if small:
        return x
    for each in range(small):
        x = x + each
    if x > 0:
        if small:
            x = x + 4
    return x
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "code.py"
    file.write_text(CODE)
    linecache.checkcache()
    return str(file)


def lines(path: str, *numbers: int) -> set[tuple[str, int]]:
    return {(path, number) for number in numbers}


@pytest.mark.parametrize(
    ("one", "many", "headers"),
    [
        ((3, 4), (3,), [3]),
        ((3, 4), (3, 4), []),
        ((3, 4), (), []),  # the ranks do not run the function
        ((5, 6), (5, 8), []),  # they run the other arm
        ((5, 8), (5,), [5]),
        ((9, 10), (9, 11, 13), []),  # they run the code after it
        ((11, 12), (11,), [11]),
        ((13, 14, 15), (13,), [13]),  # the outer condition decides
    ],
)
def test_conditions_of_arms_that_ranks_leave_out(
    path: str, one: tuple[int, ...], many: tuple[int, ...], headers: list[int]
) -> None:
    found = list(list_left_out(lines(path, *one), lines(path, *many)))
    assert [each.header.line for each in found] == headers
    assert all(each.function == (path, 3) for each in found)


@pytest.mark.parametrize(
    ("executed", "idle"),
    [
        ((3,), {3}),
        ((3, 4), set()),
        ((5, 8), set()),  # the other arm
        ((9, 11, 12), {9}),  # the loop is no condition
        ((13, 14), {13, 14}),  # the inner condition leads to nothing
        ((13, 14, 15), set()),
    ],
)
def test_conditions_without_an_executed_arm(path: str, executed: tuple[int, ...], idle: set[int]) -> None:
    assert list_idle(lines(path, *executed)) == lines(path, *idle)

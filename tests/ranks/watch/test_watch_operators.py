"""One page shows the operators of a script under tensor parallelism beside those of one device."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from forked.python import ForkedPython

from moeverify.report.operator_file import read
from moeverify.results.operator_table import OperatorTable

SCRIPT = Path(__file__).parent / "programs" / "train_fsdp_tp.py"
OPTIONS = ("--steps", "1")

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def run(python: ForkedPython, *words: str | Path) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*python.command(), "-m", "moeverify", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def watch(python: ForkedPython, folder: Path, *command: str | Path) -> Path:
    run(python, "watch", "--out", folder, "--steps", "0", "--operators", "0", "--", *command, *OPTIONS)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, python: ForkedPython) -> Path:
    return watch(python, tmp_path_factory.mktemp("one") / "one", *python.command(), SCRIPT)


@pytest.fixture
def compare(one: Path, tmp_path: Path, python: ForkedPython) -> Callable[[str], tuple[OperatorTable, str]]:
    """Return a function that runs the script with a bug under tensor parallelism, and compares both runs."""

    def do(bug: str) -> tuple[OperatorTable, str]:
        torchrun = python.torchrun(2, "--standalone")
        many = watch(python, tmp_path / "tp2", *torchrun, SCRIPT, "--tp", "2", "--bug", bug)
        page, table = tmp_path / "page.html", tmp_path / "table.json"
        told = run(python, "operators", one, many, "--html", page, "--json", table)
        assert "tp2 against one: operators of step 0" in page.read_text()
        return read(table), told

    return do


def list_wrong(table: OperatorTable, phase: str) -> list[tuple[str, str, str]]:
    """Return module, operator and expression of the operators of rank 0 that differ."""
    listed = table.actual[0]
    return [
        (op.module, op.name, listed.sites[op.sites[0]].expression)
        for op, each in zip(listed.operators, table.compared[0], strict=True)
        if op.phase == phase and each.outcome == "differs"
    ]


def test_of_a_right_script_shards_and_parts_of_sums_match(
    compare: Callable[[str], tuple[OperatorTable, str]],
) -> None:
    table, told = compare("")
    assert list_wrong(table, "forward") == []
    assert table.bound == 2.0**-13
    places = {
        (op.module, op.name.partition(".")[0]): each.place
        for op, each in zip(table.actual[1].operators, table.compared[1], strict=True)
        if op.phase == "forward" and each.outcome == "match"
    }
    assert places["blocks.1.up", "mm"] == "dim 1: 24-47 of 48"
    assert places["blocks.1.down", "mm"].startswith("part of a sum over ranks 0, 1")
    assert places["blocks.1.norm", "var_mean"] == "whole"
    assert {op.phase for op in table.actual[0].operators} == {"forward", "backward", "step"}
    assert [line.split()[0] for line in told.splitlines()[:3]] == ["forward", "backward", "step"]


def test_the_first_operator_that_differs_is_where_the_sum_is_missing(
    compare: Callable[[str], tuple[OperatorTable, str]],
) -> None:
    table, _ = compare("unreduced")
    module, _, expression = list_wrong(table, "forward")[0]
    assert (module, expression) == ("blocks.1", "x + self.down(F.silu(gate) * up)")

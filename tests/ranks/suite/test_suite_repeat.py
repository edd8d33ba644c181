"""A second run must give the same bits, over the steps that a case says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = ("first_step", "every_step", "never")
CASE = "recipe: two\nlayout: {{dp_shard: 2}}\nchecks: {{repeat: {}}}\n"
RECIPE = "base: tiny\nsteps: 2\n"


@pytest.mark.parametrize(
    ("fault", "verdicts"),
    [
        ("stray_from_step_0", ["mismatch", "mismatch", None]),
        ("stray_from_step_1", ["pass", "mismatch", None]),
    ],
)
def test_updates_that_differ_from_run_to_run(
    tmp_path: Path, make_project: Callable[..., Any], fault: str, verdicts: list[str | None]
) -> None:
    project = make_project(tmp_path)
    (tmp_path / "cases" / "recipes" / "two.yaml").write_text(RECIPE)
    for steps in STEPS:
        project.write_case(steps, CASE.format(steps))
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    project.variables["PYTHONPATH"] = path
    _, cases = project.run("cases", "--fault", f"suite_faults:{fault}")
    found = [{check["name"]: check for check in cases[steps]["checks"]} for steps in STEPS]
    assert [checks.get("repeat", {}).get("verdict") for checks in found] == verdicts
    assert {checks["update"]["verdict"] for checks in found} == {"pass"}
    assert found[0]["repeat"]["tensors"] < found[1]["repeat"]["tensors"]


def test_a_second_run_does_not_hold_the_model_of_the_first(
    tmp_path: Path, make_project: Callable[..., Any]
) -> None:
    project = make_project(tmp_path)
    project.write_case("a", "recipe: tiny\nlayout: {dp_shard: 2}\n")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    project.variables["PYTHONPATH"] = path
    _, cases = project.run("cases", "--fault", "suite_faults:count_models")
    assert cases["a"]["verdict"] == "pass", cases["a"]["reason"]
    assert any(check["name"] == "repeat" for check in cases["a"]["checks"])

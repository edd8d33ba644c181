"""A second run must reproduce the same bits, over the steps that a case names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

STEPS = ("first_step", "every_step", "never")
FAULTS = ("stray_from_step_0", "stray_from_step_1")
CASE = "recipe: two\nlayout: {{dp_shard: 2}}\nchecks: {{repeat: {}}}\n"
RECIPE = "base: tiny\nsteps: 2\n"


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory,
    make_project: Callable[..., Any],
    run_with_faults: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    project = make_project(tmp_path_factory.mktemp("repeat"))
    (project.folder / "cases" / "recipes" / "two.yaml").write_text(RECIPE)
    faults = {f"{fault}-{steps}": fault for fault in FAULTS for steps in STEPS}
    for name in faults:
        project.write_case(name, CASE.format(name.rpartition("-")[2]))
    project.write_case("models", "recipe: tiny\nlayout: {dp_shard: 2}\n")
    return run_with_faults(project, faults | {"models": "count_models"})


@pytest.mark.parametrize(
    ("fault", "verdicts"),
    [
        ("stray_from_step_0", ["mismatch", "mismatch", None]),
        ("stray_from_step_1", ["pass", "mismatch", None]),
    ],
)
def test_updates_that_differ_from_run_to_run(
    cases: dict[str, Any], fault: str, verdicts: list[str | None]
) -> None:
    found = [{check["name"]: check for check in cases[f"{fault}-{steps}"]["checks"]} for steps in STEPS]
    assert [checks.get("repeat", {}).get("verdict") for checks in found] == verdicts
    assert {checks["update"]["verdict"] for checks in found} == {"pass"}
    assert found[0]["repeat"]["tensors"] < found[1]["repeat"]["tensors"]


def test_a_second_run_does_not_hold_the_model_of_the_first(cases: dict[str, Any]) -> None:
    case = cases["models"]
    assert case["verdict"] == "pass", case["reason"]
    assert any(check["name"] == "repeat" for check in case["checks"])

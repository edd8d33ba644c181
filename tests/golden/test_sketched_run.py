"""A golden of sketches from its recording to verdicts, as a user runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

CASE = """\
recipe: sketched
layout: {dp_shard: 2, ep: 2}
checks: {repeat: never}
"""
FAULT = "moeverify.faults.catalogue.expert_gradients:a04_expert_divided_twice"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, make_project: Callable[..., Any]) -> dict[str, Any]:
    """Return the output of each command."""
    project = make_project(tmp_path_factory.mktemp("sketched"))
    recipe = "model: {preset: stress}\nsteps: 1\nseed: 77\n"
    (project.folder / "cases" / "recipes" / "sketched.yaml").write_text(recipe)
    project.write_case("sketched", CASE)
    return {
        "plan": project.do("golden", "cases", "--device", "cpu", "--plan"),
        "golden": project.do("golden", "cases", "--device", "cpu", "--sketch"),
        "files": list(project.goldens),
        "clean": project.run("cases"),
        "fault": project.run("cases", "--sketch", "--set", "layout.dp_shard=4", "--fault", FAULT),
    }


def test_a_plan_computes_nothing_and_names_memory_and_time(done: dict[str, Any]) -> None:
    plan = done["plan"]
    assert plan.code == 0, plan.err
    assert [word for word in ("memory", "disk", "time") if word not in plan.out] == []
    assert "recorded" in done["golden"].out
    assert done["files"] == ["sketched.cpu+sketch.json"]


def test_a_run_finds_the_sketch_and_judges_by_it(done: dict[str, Any]) -> None:
    state, cases = done["clean"]
    case = cases["sketched"]
    assert (state.code, case["verdict"]) == (0, "pass"), state.out
    notes = {check["name"]: check["note"] for check in case["checks"]}
    for name in ("gradient", "update"):
        assert notes[name].endswith("by sketch, 8 projections")
    assert notes["loss"] == ""


def test_a_fault_is_a_mismatch_in_blocks_of_experts(done: dict[str, Any]) -> None:
    state, cases = done["fault"]
    case = cases["sketched"]
    assert (state.code, case["verdict"]) == (1, "mismatch"), state.out
    first = case["findings"][0]
    assert first["check"] == "gradient"
    assert ".experts." in first["tensor"]
    assert first["scale"] == pytest.approx(0.5, rel=1e-9)
    assert first["error"] == pytest.approx(0.5, rel=0.5)
    assert len(first["facts"]["block"]) == 3
    assert "no cause was searched for" in state.out

"""Ranks that issue different collectives are found, both in runs that hang and in runs that do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

FAULTS = {
    "reduce_other_shapes": ("all_reduce on float32[2, 8]", "all_reduce on float32[16]"),
    "reduce_other_types": ("all_reduce on float64[4]", "all_reduce on int64[4]"),
    "swap": ("all_reduce on float64[4]", "broadcast on float64[4], root 0"),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, make_project: Callable[..., Any]) -> Any:
    project = make_project(tmp_path_factory.mktemp("trace"), "tiny")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    project.variables["PYTHONPATH"] = path
    return project


@pytest.fixture(scope="module")
def cases(project: Any, run_with_faults: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    project.write_case("reduce_other_types")
    return run_with_faults(project, {"reduce_other_types": "reduce_other_types"})


def check_disagreement(case: dict[str, Any], fault: str) -> None:
    assert [check["name"] for check in case["checks"] if check["verdict"] != "pass"] == ["trace"]
    (finding,) = case["findings"]
    assert (finding["check"], finding["code"]) == ("trace", "collectives")
    for rank, signature in enumerate(FAULTS[fault]):
        assert any(line.startswith(f"rank {rank}: {signature}, called at ") for line in finding["evidence"])
    assert "suite_faults.py" in finding["evidence"][0]
    assert "the ranks issue different collectives, first as collective #" in finding["cause"]


def test_a_disagreement_is_a_finding_of_its_own(project: Any, cases: dict[str, Any]) -> None:
    check_disagreement(cases["reduce_other_types"], "reduce_other_types")
    done, found = project.run("cases/tiny.yaml", "--fault", "suite_faults:reduce_other_shapes")
    assert done.code == 1, done
    check_disagreement(found["tiny"], "reduce_other_shapes")
    assert found["tiny"]["findings"][0]["cause"] in " ".join(done.out.split())


def test_ranks_that_agree_pass_and_say_how_much_was_compared(cases: dict[str, Any]) -> None:
    (check,) = [check for check in cases["tiny"]["checks"] if check["name"] == "trace"]
    assert (check["verdict"], check["tensors"] > 0) == ("pass", True)
    assert check["note"].endswith("collectives of a rank")


def test_a_run_that_ends_badly_tells_the_disagreement(project: Any) -> None:
    project.write_case("stuck", "recipe: tiny\nlayout: {dp_shard: 2}\nchecks: {timeout: 5.0}\n")
    done, cases = project.run("cases/stuck.yaml", "--fault", "suite_faults:swap")
    assert done.code == 3, done
    reason = cases["stuck"]["reason"]
    assert "the ranks disagree on collective #" in reason
    for rank, signature in enumerate(FAULTS["swap"]):
        assert f"rank {rank} {signature}, called at " in reason

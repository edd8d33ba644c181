"""A failed diagnosis costs no verdict: checks and findings are unchanged, and a note gives the reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, make_project: Callable[..., Any]) -> Any:
    project = make_project(tmp_path_factory.mktemp("diagnosis"), "tiny")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    project.variables["PYTHONPATH"] = path
    return project


def run(project: Any, fault: str) -> tuple[Any, Any, Any]:
    """Return the process, the case, and the failure noted by its first finding; no finding has a cause."""
    done, case, seen = run_to_failure(project, fault)
    # A check that computes the optimizer step again names its cause by itself.
    assert {finding["code"] for finding in case["findings"] if finding["check"] != "optimizer step"} == {""}
    assert len(case["findings"][0]["observations"]) == 1
    return done, case, seen


def run_to_failure(project: Any, fault: str) -> tuple[Any, Any, Any]:
    """Return the process, the case, and the failure noted by its first finding."""
    done, cases = project.run("cases", "--fault", f"suite_faults:{fault}")
    case = cases["tiny"]
    assert (done.code, case["verdict"], case["reason"]) == (1, "mismatch", ""), done
    assert "update" in [check["name"] for check in case["checks"] if check["verdict"] != "pass"]
    assert len(case["checks"]) > 8
    assert "update" in {finding["check"] for finding in case["findings"]}
    assert project.find_remains() == []
    observations = case["findings"][0]["observations"]
    (seen,) = [each for each in observations if each["kind"] == "diagnosis-failed"]
    (note,) = [note for note in case["notes"] if seen["message"] in note]
    assert seen["site"] in note
    return done, case, seen


def test_what_raised_and_where_is_told(project: Any) -> None:
    done, case, seen = run(project, "fail_to_diagnose")
    assert (seen["error"], seen["message"]) == ("ZeroDivisionError", "planted in the diagnosis")
    assert seen["site"].startswith("suite_faults.py:")
    assert seen["site"] in done.out
    assert case["rank_reports"] == []


def test_a_rank_that_is_lost_meanwhile_is_told(project: Any) -> None:
    _, case, seen = run(project, "die_in_diagnosis")
    assert "rank 1 was killed by SIGKILL" in seen["message"]
    assert (seen["error"], seen["site"]) == ("", "")
    assert len(case["rank_reports"]) == 2


def find_causes(case: Any) -> set[str]:
    """Return the causes that hypotheses give for the findings."""
    return {finding["cause"] for finding in case["findings"] if finding["check"] == "gradient"} - {""}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise_in_recorder", "rank 1 raised ZeroDivisionError: planted in the recorder"),
        ("die_in_recorder", "rank 1 was killed by SIGKILL"),
    ],
)
def test_causes_are_kept_where_a_rank_is_lost_while_it_records(project: Any, fault: str, said: str) -> None:
    _, case, seen = run_to_failure(project, fault)
    assert said in seen["message"]
    assert find_causes(case)
    assert case["timeline"]
    assert not any(finding["culprit"] for finding in case["findings"])


def test_the_first_wrong_place_is_kept_where_the_search_is_lost(project: Any) -> None:
    _, case, seen = run_to_failure(project, "die_in_search")
    assert "rank 0 was killed by SIGKILL" in seen["message"]
    assert find_causes(case)
    (culprit,) = [finding["culprit"] for finding in case["findings"] if finding["culprit"]]
    assert culprit["here"]["line"]["file"]

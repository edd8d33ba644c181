"""A user's view of ranks that raise, die or hang, and of interrupted runs; and the files left behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # several launches, on a machine that may be busy

ACTS = ("raise", "kill", "hang", "pass")


def find_variables(folder: Path) -> dict[str, str]:
    """Return the variables by which ranks find the fault, and the fault finds its actions."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "MOEVERIFY_TEST_ACTS": str(folder / "acts")}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory, make_project: Callable[..., Any]) -> Any:
    """Return one run of four cases: rank 1 raises, is killed and hangs in three; the last is right."""
    folder = tmp_path_factory.mktemp("failures")
    project = make_project(folder, *ACTS)
    project.write_case("hang", "recipe: tiny\nlayout: {dp_shard: 2}\nchecks: {timeout: 4.0}\n")
    (folder / "acts").write_text("\n".join(ACTS))
    project.variables |= find_variables(folder)
    words = [f"cases/{act}.yaml" for act in ACTS]
    done, cases = project.run(*words, "--fault", "suite_faults:act")
    assert list(cases) == list(ACTS), done
    return project, done, cases


def read_reports(failures: Any, name: str) -> dict[int, Mapping[str, Any]]:
    return {report["rank"]: report for report in failures[2][name]["rank_reports"]}


def test_the_run_ends_with_the_code_of_a_failure_and_nothing_is_left(failures: Any) -> None:
    project, done, cases = failures
    assert (done.code, done.err) == (3, "")
    assert [case["verdict"] for case in cases.values()] == ["error", "error", "error", "pass"]
    assert project.find_remains() == []
    assert project.goldens == {}


def test_a_rank_that_raises(failures: Any) -> None:
    _, done, cases = failures
    assert cases["raise"]["reason"].startswith("rank 1 raised ZeroDivisionError: planted on rank 1")
    reports = read_reports(failures, "raise")
    assert set(reports) == {0, 1}
    assert reports[1]["state"] == "raised"
    assert "in act" in reports[1]["stack"]
    assert "ZeroDivisionError: planted on rank 1" in done.out
    repeat = next(line for line in done.out.splitlines() if "moeverify run cases/raise.yaml -k raise" in line)
    assert "--fault suite_faults:act" in repeat


def test_a_rank_that_is_killed(failures: Any) -> None:
    assert failures[2]["kill"]["reason"].startswith("rank 1 was killed by SIGKILL")
    assert read_reports(failures, "kill")[1]["state"] == "killed"


def test_a_rank_that_hangs_while_the_others_wait_in_a_collective(failures: Any) -> None:
    assert failures[2]["hang"]["reason"].startswith("over its 4 s")
    reports = read_reports(failures, "hang")
    assert {report["state"] for report in reports.values()} == {"hung"}
    assert "in act" in reports[1]["stack"]
    assert reports[0]["last_collective"]
    assert "in act" not in reports[0]["stack"]
    first, *_ = [record for record in reports[0]["recent"] if record["state"] == "started"]
    assert 1 in first["group"]
    assert reports[0]["recent"][-1]["number"] == reports[0]["collective"]["number"]
    assert all(record["number"] < first["number"] for record in reports[1]["recent"])


def test_the_case_after_those_that_failed_is_compared_in_full(failures: Any) -> None:
    checks = failures[2]["pass"]["checks"]
    assert sum(check["tensors"] for check in checks) > 50


def test_ctrl_c_leaves_no_process_no_file_and_no_golden_harmed(
    tmp_path: Path, make_project: Callable[..., Any]
) -> None:
    project = make_project(tmp_path, "first")
    (tmp_path / "golden").mkdir()
    (tmp_path / "golden" / "tiny.cpu.json").write_text("what somebody has recorded")
    (tmp_path / "acts").write_text("hang")
    project.variables |= find_variables(tmp_path)
    words = ["--device", "cpu", "--fault", "suite_faults:act", "--json", "result.json"]
    process = project.start("run", "cases", *words)
    try:
        assert process.stdout is not None
        seen = next((line for line in process.stdout if line.startswith("running first")), "")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert seen, out
    assert (process.returncode, err) == (130, "interrupted\n")
    (case,) = json.loads((tmp_path / "result.json").read_text())["cases"]
    assert (case["verdict"], case["reason"]) == ("skipped", "interrupted while this case ran")
    assert project.goldens == {"tiny.cpu.json": b"what somebody has recorded"}
    assert project.find_remains() == []


def test_more_ranks_than_allowed_are_skipped_with_the_reason(
    tmp_path: Path, make_project: Callable[..., Any]
) -> None:
    done, cases = make_project(tmp_path, "first").run("cases", "--ranks", "1")
    assert done.code == 0
    assert cases["first"]["verdict"] == "skipped"
    assert cases["first"]["reason"] == "needs 2 ranks; --ranks 1"
    assert "needs 2 ranks; --ranks 1" in done.out

"""Successful jobs: one launch runs them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job, JobOutcome, LaunchEvent


@pytest.fixture(scope="module")
def run(programs: Path, remains: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("jobs")
    sizes = [2, 1, 3, 2]
    jobs = [Job(name=f"job {index}/{size}", num_ranks=size) for index, size in enumerate(sizes)]
    events: list[LaunchEvent] = []
    outcomes = list(run_jobs(jobs, entry=str(programs / "jobs.py"), folder=folder, on_event=events.append))
    left = remains.list_processes(folder)
    return {"folder": folder, "jobs": jobs, "outcomes": outcomes, "events": events, "left": left}


def read_results(outcomes: list[JobOutcome]) -> list[dict[str, Any]]:
    return [outcome.result or {} for outcome in outcomes]


def test_every_job_has_its_ranks_and_its_result_in_order(run: dict[str, Any]) -> None:
    assert [outcome.state for outcome in run["outcomes"]] == ["done"] * 4
    assert [outcome.job for outcome in run["outcomes"]] == [job.name for job in run["jobs"]]
    assert [outcome.index for outcome in run["outcomes"]] == [0, 1, 2, 3]
    assert [result["total"] for result in read_results(run["outcomes"])] == [3.0, 1.0, 6.0, 3.0]


def test_the_ranks_stay_up_between_jobs(run: dict[str, Any]) -> None:
    pids = [result["pids"] for result in read_results(run["outcomes"])]
    assert len(set(pids[2])) == 3
    assert all(some == pids[2][: len(some)] for some in pids)
    assert [outcome.launch for outcome in run["outcomes"]] == [1] * 4


def test_a_rank_has_one_thread_unless_the_user_says_otherwise(run: dict[str, Any]) -> None:
    assert {result["threads"] for result in read_results(run["outcomes"])} == {1}


def test_events_tell_the_launch_and_each_job(run: dict[str, Any]) -> None:
    kinds = [event.kind for event in run["events"] if event.kind != "up"]
    assert kinds == ["launch"] + ["start", "report", "end"] * 4
    assert [event.num_ranks for event in run["events"] if event.kind in ("launch", "up")] == [3, 3]
    assert [event.detail for event in run["events"] if event.kind == "report"] == [
        f"{job.name} added" for job in run["jobs"]
    ]


def test_a_job_that_retires_its_ranks_ends_its_launch_and_what_they_forked(
    programs: Path, remains: Any, tmp_path: Path
) -> None:
    """Rank 1 alone asks for it. Its child has a session of its own and ignores SIGTERM."""
    sizes, events = [2, 3, 1], list[LaunchEvent]()
    jobs = [
        Job(name=f"{index}", num_ranks=size, payload={"retires": 1} if index < 2 else {})
        for index, size in enumerate(sizes)
    ]
    outcomes = list(run_jobs(jobs, entry=str(programs / "jobs.py"), folder=tmp_path, on_event=events.append))
    assert [(outcome.state, outcome.launch) for outcome in outcomes] == [
        ("done", 1),
        ("done", 2),
        ("done", 3),
    ]
    assert "lost" not in [event.kind for event in events]
    assert remains.list_processes(tmp_path) == []


def test_output_of_ranks_is_in_their_logs(run: dict[str, Any]) -> None:
    logs = [(run["folder"] / "launch-1" / f"rank-{rank}.out").read_text() for rank in range(3)]
    assert [log.splitlines() for log in logs] == [["rank 0 adds"] * 4, ["rank 1 adds"] * 3, ["rank 2 adds"]]


def test_nothing_runs_after_the_last_job(run: dict[str, Any]) -> None:
    assert run["left"] == []


def test_a_controller_neither_imports_torch_nor_shows_what_ranks_write(
    programs: Path, tmp_path: Path
) -> None:
    jobs = [{"name": "add", "num_ranks": 1}]
    code = (
        "import json, pathlib, sys\n"
        "from moeverify.verification.launch.launcher import run_jobs\n"
        "from moeverify.verification.launch.plan import Job\n"
        "jobs = [Job(**each) for each in json.loads(sys.argv[1])]\n"
        "(outcome,) = run_jobs(jobs, entry=sys.argv[2], folder=pathlib.Path(sys.argv[3]))\n"
        "assert outcome.state == 'done', outcome\n"
        "assert 'torch' not in sys.modules\n"
    )
    arguments = [json.dumps(jobs), str(programs / "jobs.py"), str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_rank_that_is_through_first_keeps_its_groups_for_the_others(programs: Path, tmp_path: Path) -> None:
    jobs = [Job(name="early", num_ranks=2, payload={"do": "leave_first"})]
    (outcome,) = run_jobs(jobs, entry=str(programs / "jobs.py"), folder=tmp_path)
    assert (outcome.state, outcome.failure) == ("done", None)

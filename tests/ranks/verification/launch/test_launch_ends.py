"""However a run ends, no rank survives it, and no file is left outside its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import moeverify
from moeverify.report.words.failure import describe_failure
from moeverify.verification.launch import monitor
from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job, LaunchEvent

as_users_start_it = pytest.mark.usefixtures("python_as_users_start_it")
PYTHONPATH = os.pathsep.join([str(Path(moeverify.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def controller(programs: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process whose launch has two ranks inside an endless job."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(programs / "controller.py"), str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": PYTHONPATH},
    )
    assert process.stdout is not None
    seen: set[str] = set()
    while not {"up", "start"} <= seen:
        line = process.stdout.readline()
        assert line, process.communicate()
        seen.add(line.strip())
    yield process
    process.kill()
    process.communicate()


def check_nothing_left(remains: Any, folder: Path) -> None:
    assert remains.wait_for_none(folder / "run") == []
    assert list((folder / "tmp").iterdir()) == []


def test_ctrl_c_ends_all_ranks_and_reaches_the_caller(
    controller: subprocess.Popen[str], remains: Any, tmp_path: Path
) -> None:
    assert len(remains.list_processes(tmp_path / "run")) == 4
    controller.send_signal(signal.SIGINT)
    out, errors = controller.communicate(timeout=30)
    assert (out, errors, controller.returncode) == ("interrupted\n", "", 0)
    assert remains.list_processes(tmp_path / "run") == []
    check_nothing_left(remains, tmp_path)


def test_ctrl_c_ends_the_ranks_of_an_agent_that_does_not_answer(
    controller: subprocess.Popen[str], remains: Any, tmp_path: Path
) -> None:
    (agent,) = psutil.Process(controller.pid).children()
    agent.suspend()
    controller.send_signal(signal.SIGINT)
    out, errors = controller.communicate(timeout=30)
    assert (out, errors, controller.returncode) == ("interrupted\n", "", 0)
    check_nothing_left(remains, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_controller_that_is_killed_takes_all_ranks_along(
    controller: subprocess.Popen[str], remains: Any, tmp_path: Path, number: signal.Signals
) -> None:
    controller.send_signal(number)
    controller.communicate(timeout=30)
    check_nothing_left(remains, tmp_path)


@as_users_start_it
def test_an_agent_that_is_killed_takes_its_ranks_along_and_is_named(
    programs: Path, remains: Any, tmp_path: Path
) -> None:
    agents = []

    def kill_agent(event: LaunchEvent) -> None:
        if event.kind == "start" and event.job == "endless":
            family = psutil.Process().children()
            (agent,) = [child for child in family if "moeverify.verification.launch.agent" in child.cmdline()]
            agents.append(agent.pid)
            agent.kill()

    jobs = [
        Job(name="endless", num_ranks=2, payload={"do": "sleep"}),
        Job(name="add", num_ranks=1),
    ]
    entry = str(programs / "jobs.py")
    first, second = run_jobs(jobs, entry=entry, folder=tmp_path, on_event=kill_agent)
    assert len(agents) == 1
    assert first.state == "failed"
    assert "the launcher's process was killed by SIGKILL" in describe_failure(first.failure)
    assert [report.rank for report in first.rank_reports] == [0, 1]
    assert second.state == "done"
    assert remains.wait_for_none(tmp_path) == []


@as_users_start_it
def test_closing_the_iterator_ends_the_ranks(programs: Path, remains: Any, tmp_path: Path) -> None:
    jobs = [Job(name="add", num_ranks=2), Job(name="endless", num_ranks=2, payload={"do": "sleep"})]
    outcomes = run_jobs(jobs, entry=str(programs / "jobs.py"), folder=tmp_path)
    assert next(outcomes).state == "done"
    outcomes.close()
    assert remains.list_processes(tmp_path) == []


@as_users_start_it
def test_an_entry_that_cannot_be_imported_is_said_once(tmp_path: Path) -> None:
    entry = tmp_path / "broken.py"
    entry.write_text("import a_module_that_is_not_there\n")
    events: list[LaunchEvent] = []
    jobs = [Job(name="a", num_ranks=2), Job(name="b", num_ranks=1)]
    outcomes = list(run_jobs(jobs, entry=str(entry), folder=tmp_path / "run", on_event=events.append))
    assert [outcome.state for outcome in outcomes] == ["unstarted", "unstarted"]
    assert "before its first job" in describe_failure(outcomes[0].failure)
    assert "No module named 'a_module_that_is_not_there'" in describe_failure(outcomes[0].failure)
    origin = outcomes[0].rank_reports[0]
    assert origin.state == "raised"
    assert "broken.py" in origin.stack
    assert [event.kind for event in events].count("launch") == 1


def test_a_launch_that_dies_between_two_jobs_is_said_and_replaced(programs: Path, tmp_path: Path) -> None:
    # A file blocks the path of the second job's folder: no rank can begin that job.
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "0001").touch()
    events: list[LaunchEvent] = []
    jobs = [Job(name="first", num_ranks=2), Job(name="second", num_ranks=2)]
    entry = str(programs / "jobs.py")
    first, second = run_jobs(jobs, entry=entry, folder=tmp_path, on_event=events.append)
    assert (first.state, second.state) == ("done", "unstarted")
    (lost,) = [event for event in events if event.kind == "lost"]
    found = describe_failure(lost.failure)
    assert found.startswith("the launch failed between two jobs: rank 0 raised FileExistsError")
    assert "FileExistsError" in describe_failure(second.failure)
    assert [event.kind for event in events].count("launch") == 2


def test_a_waiting_rank_that_dies_is_named_in_the_job_that_it_ends(programs: Path, tmp_path: Path) -> None:
    pids: list[int] = []

    def kill_the_waiting_rank(event: LaunchEvent) -> None:
        if event.kind == "end" and event.outcome is not None and event.outcome.result:
            pids.extend(event.outcome.result["pids"])
        if event.kind == "start" and event.job == "pause":
            os.kill(pids[1], signal.SIGKILL)

    jobs = [
        Job(name="first", num_ranks=2),
        Job(name="pause", num_ranks=1, payload={"do": "pause", "seconds": 60}),
        Job(name="last", num_ranks=1),
    ]
    entry = str(programs / "jobs.py")
    outcomes = list(run_jobs(jobs, entry=entry, folder=tmp_path, on_event=kill_the_waiting_rank))
    assert [outcome.state for outcome in outcomes] == ["done", "failed", "done"]
    assert describe_failure(outcomes[1].failure).startswith(
        "rank 1, which only waited, was killed by SIGKILL"
    )
    assert [report.rank for report in outcomes[1].rank_reports] == [1, 0]


@pytest.mark.parametrize("launches", [1, 2])
def test_a_launch_that_is_killed_before_its_first_job_is_tried_once_more(
    programs: Path, tmp_path: Path, launches: int
) -> None:
    entry = tmp_path / "fragile.py"
    entry.write_text(
        "import os, runpy, signal, sys\n"
        f"if int(sys.argv[1].split('launch-')[1][0]) <= {launches}:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"runpy.run_path({str(programs / 'jobs.py')!r}, run_name='__main__')\n"
    )
    events: list[LaunchEvent] = []
    jobs = [Job(name="a", num_ranks=1), Job(name="b", num_ranks=1)]
    outcomes = list(run_jobs(jobs, entry=str(entry), folder=tmp_path / "run", on_event=events.append))
    assert [event.kind for event in events].count("launch") == 2
    assert [outcome.job for outcome in outcomes] == ["a", "b"]
    if launches == 1:
        assert [outcome.state for outcome in outcomes] == ["done", "done"]
    else:
        assert [outcome.state for outcome in outcomes] == ["unstarted", "unstarted"]
        assert "before its first job: rank 0 was killed by SIGKILL" in describe_failure(outcomes[0].failure)


def write_late_entry(programs: Path, folder: Path, line: str, ranks: str = "2") -> str:
    """Write an entry in which some ranks, by default the third, run `line` in the first launch, before all else."""
    entry = folder / "late.py"
    entry.write_text(
        "import os, runpy, sys, time\n"
        f"if os.environ['RANK'] in '{ranks}' and sys.argv[1].endswith('launch-1/plan.json'):\n"
        f"    {line}\n"
        f"runpy.run_path({str(programs / 'jobs.py')!r}, run_name='__main__')\n"
    )
    return str(entry)


def test_a_rank_that_alone_does_not_come_up_is_named_and_costs_no_verdict(
    programs: Path, remains: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_GAP_LIMIT", 2.0)
    entry = write_late_entry(programs, tmp_path, "time.sleep(1000)")
    events: list[LaunchEvent] = []
    jobs = [Job(name="two", num_ranks=2), Job(name="three", num_ranks=3)]
    outcomes = list(run_jobs(jobs, entry=entry, folder=tmp_path / "run", on_event=events.append))
    assert [(outcome.state, outcome.launch) for outcome in outcomes] == [("done", 1), ("done", 2)]
    (lost,) = [event.failure for event in events if event.kind == "lost"]
    assert describe_failure(lost).startswith(
        "the launch failed between two jobs: "
        f"rank 2, which is at {entry}:3 in <module>, did not come up within 2 s (raise --timeout; load "
    )
    assert remains.wait_for_none(tmp_path) == []


@pytest.mark.parametrize("ranks", ["2", "012"])
def test_ranks_that_do_not_come_up_for_the_first_job_are_started_once_more(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str
) -> None:
    monkeypatch.setattr(monitor, "START_LIMIT", 6.0)
    entry = write_late_entry(programs, tmp_path, "time.sleep(1000)", ranks)
    (outcome,) = run_jobs([Job(name="three", num_ranks=3)], entry=entry, folder=tmp_path / "run")
    assert (outcome.state, outcome.launch) == ("done", 2)


def test_the_time_of_a_job_begins_when_its_ranks_are_up(programs: Path, tmp_path: Path) -> None:
    entry = write_late_entry(programs, tmp_path, "time.sleep(8)")
    job = Job(name="three", num_ranks=3, timeout=6.0)
    (outcome,) = run_jobs([job], entry=entry, folder=tmp_path / "run")
    assert (outcome.state, outcome.launch) == ("done", 1)

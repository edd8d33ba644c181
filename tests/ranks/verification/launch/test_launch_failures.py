"""Jobs that raise, die or hang: every rank is reported, the origin first, and the other jobs continue."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moeverify.report.words.failure import describe_failure, word_report
from moeverify.results.failure import EndKind, FailureCause
from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job, JobOutcome

PAYLOADS: dict[str, dict[str, Any]] = {
    "fail": {"rank": 1},
    "disguise": {"rank": 1},
    "return_a_tensor": {},
    "die": {"rank": 1, "signal": "SIGKILL"},
    "crash": {"rank": 0},
    "leave": {"rank": 1},
    "leave_among_sleepers": {"rank": 1},
    "stay_away": {"rank": 2},
    "hold_the_lock": {"rank": 1},
    "sleep": {},
}
# The others end by themselves, however busy the machine is.
HANGS = {"stay_away", "hold_the_lock", "sleep"}


def word_reports(outcome: JobOutcome) -> JobOutcome:
    return outcome.model_copy(update={"rank_reports": tuple(map(word_report, outcome.rank_reports))})


@pytest.fixture(scope="module")
def run(programs: Path, remains: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("failures")
    jobs = [
        Job(
            name=name,
            num_ranks=3 if name == "stay_away" else 2,
            timeout=3.0 if name in HANGS else 120.0,
            payload={"do": name, **payload},
        )
        for name, payload in PAYLOADS.items()
    ]
    jobs.append(Job(name="add", num_ranks=2))
    outcomes = list(run_jobs(jobs, entry=str(programs / "jobs.py"), folder=folder))
    return {
        "outcomes": {outcome.job: word_reports(outcome) for outcome in outcomes},
        "left": remains.list_processes(folder),
    }


@pytest.fixture
def outcomes(run: dict[str, Any]) -> dict[str, JobOutcome]:
    found: dict[str, JobOutcome] = run["outcomes"]
    return found


def test_every_job_is_reported_and_the_last_one_succeeds(outcomes: dict[str, JobOutcome]) -> None:
    assert list(outcomes) == [*PAYLOADS, "add"]
    assert outcomes["add"].state == "done"
    assert outcomes["add"].launch == len(PAYLOADS) + 1


def test_every_rank_of_a_failed_job_is_reported(outcomes: dict[str, JobOutcome]) -> None:
    for name in PAYLOADS:
        ranks = sorted(report.rank for report in outcomes[name].rank_reports)
        assert ranks == ([0, 1, 2] if name == "stay_away" else [0, 1]), name
        assert all(report.pid and report.host for report in outcomes[name].rank_reports), name


def test_nothing_is_left(run: dict[str, Any]) -> None:
    assert run["left"] == []


def test_a_rank_that_raises(outcomes: dict[str, JobOutcome]) -> None:
    outcome = outcomes["fail"]
    origin, peer = outcome.rank_reports
    assert (outcome.state, origin.rank, origin.state) == ("failed", 1, "raised")
    assert describe_failure(outcome.failure) == "rank 1 raised ArithmeticError: the sum does not add up"
    assert origin.stack.startswith("Traceback (most recent call last)")
    assert "in fail" in origin.stack
    assert origin.stack.rstrip().endswith("ArithmeticError: the sum does not add up\nand more")
    assert peer.state == "stopped"
    assert "in fail" in peer.stack
    assert peer.last_collective.startswith("all_reduce #1 of group (0,1) on float32[2], called at ")


def test_a_result_that_is_no_json(outcomes: dict[str, JobOutcome]) -> None:
    outcome = outcomes["return_a_tensor"]
    assert (outcome.state, outcome.rank_reports[0].rank) == ("failed", 0)
    assert "not JSON serializable" in describe_failure(outcome.failure)
    assert outcome.rank_reports[0].stack.startswith("Traceback")


def test_a_rank_reports_before_its_peers_can_notice(outcomes: dict[str, JobOutcome]) -> None:
    outcome = outcomes["disguise"]
    assert describe_failure(outcome.failure) == "rank 1 raised ArithmeticError: the origin"


def test_a_rank_that_is_killed(outcomes: dict[str, JobOutcome]) -> None:
    outcome = outcomes["die"]
    origin, peer = outcome.rank_reports
    assert (outcome.state, origin.rank, origin.state) == ("failed", 1, "killed")
    assert origin.end is not None
    assert (origin.end.how, origin.end.signal) == (EndKind.KILLED, 9)
    assert "rank 1 was killed by SIGKILL" in describe_failure(outcome.failure)
    assert origin.last_collective.startswith("all_reduce #1 of group (0,1) on float32[3]")
    assert peer.last_collective.startswith("all_reduce #2 of group (0,1) on float32[2]")
    assert "in die" in peer.stack


def test_a_rank_that_crashes_in_c_code(outcomes: dict[str, JobOutcome]) -> None:
    origin = outcomes["crash"].rank_reports[0]
    assert (origin.rank, origin.state, origin.summary) == (0, "killed", "was killed by SIGSEGV")
    assert "Fatal Python error: Segmentation fault" in origin.stack
    assert "in crash" in origin.stack
    assert "run_entry" not in origin.stack
    assert origin.stack.endswith("about to crash")


def test_a_rank_that_ends_itself(outcomes: dict[str, JobOutcome]) -> None:
    origin = outcomes["leave"].rank_reports[0]
    assert (origin.rank, origin.state, origin.summary) == (1, "lost", "ended with status 7 without a report")
    assert origin.stack.endswith("farewell")


def test_a_rank_that_leaves_with_status_0_ends_the_job_of_waiting_ranks(
    outcomes: dict[str, JobOutcome],
) -> None:
    outcome = outcomes["leave_among_sleepers"]
    lost, waiting = outcome.rank_reports
    assert (outcome.state, lost.rank, lost.summary) == ("failed", 1, "ended with status 0 without a report")
    assert "in leave_among_sleepers" in waiting.stack


def test_a_hang_names_who_waits_where_and_who_is_late(outcomes: dict[str, JobOutcome]) -> None:
    outcome = outcomes["stay_away"]
    late, *waiting = outcome.rank_reports
    assert (outcome.state, late.rank, late.state) == ("hung", 2, "hung")
    assert re.match(
        r"over its 3 s \(raise --timeout; load [^)]+\): ranks 0, 1 wait in all_reduce #2 of group \(0,1,2\)",
        describe_failure(outcome.failure),
    )
    assert outcome.failure is not None
    assert (outcome.failure.cause, outcome.failure.timeout) == (FailureCause.OVER_TIME, 3.0)
    assert outcome.failure.hang is not None
    (wait,) = outcome.failure.hang.waits
    assert (wait.ranks, wait.collective.op, wait.collective.sequence) == ((0, 1), "all_reduce", 2)
    assert [(absence.rank, absence.how) for absence in wait.absent] == [(2, "never entered")]
    assert "; rank 2 never entered it: it is at " in describe_failure(outcome.failure)
    assert describe_failure(outcome.failure).endswith("in stay_away")
    assert "time.sleep(1000)" in late.stack
    assert late.last_collective.endswith("finished")
    for report in waiting:
        assert report.state == "hung"
        assert "all_reduce" in report.stack
        assert report.last_collective.endswith("not seen to finish")


def test_a_hang_inside_c_code_that_holds_the_lock(outcomes: dict[str, JobOutcome]) -> None:
    outcome = outcomes["hold_the_lock"]
    late = outcome.rank_reports[0]
    assert (outcome.state, late.rank, late.state) == ("hung", 1, "hung")
    assert "holds the interpreter's lock" in late.summary
    assert "in hold_the_lock" in late.stack
    assert "rank 1 never entered it" in describe_failure(outcome.failure)


def test_a_hang_without_any_collective(outcomes: dict[str, JobOutcome]) -> None:
    outcome = outcomes["sleep"]
    assert outcome.state == "hung"
    assert "no rank waits in a collective" in describe_failure(outcome.failure)
    assert all("in sleep" in report.stack for report in outcome.rank_reports)

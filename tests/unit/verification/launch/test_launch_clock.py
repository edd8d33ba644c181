"""The clock of limits: it stops for ranks that wait for a processor, and not for ranks that are stuck."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moeverify.report.words.failure import describe_failure
from moeverify.results.failure import FailureCause, JobFailure, MachineLoad
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.launch import clock as clocks
from moeverify.verification.launch.clock import ActiveClock, ProcessTree, PublishedClock, Usage, read_usage
from moeverify.verification.launch.failure_reporter import FailureReporter


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose last element is the wall time."""
    times = [100.0]
    monkeypatch.setattr(clocks.time, "monotonic", lambda: times[-1])
    return times


@pytest.mark.parametrize(
    ("usage", "advance"),
    [
        (Usage(ran=0.0, waited=0.0), 10.0),  # all sleep in a collective
        (Usage(ran=10.0, waited=0.0), 10.0),  # one computes without end
        (Usage(ran=0.5, waited=9.5), 0.5),  # one gets 5 % of a processor, and the others wait for it
        (Usage(ran=0.5, waited=76.0), 0.5),  # eight ranks get 5 % each
        (Usage(ran=0.5, waited=9.0), 1.0),  # a poller: it sleeps, and waits after each sleep
        (Usage(ran=0.0, waited=20.0), 10.0 / 64),  # none gets any
        (Usage(ran=30.0, waited=0.0), 10.0),  # what a killed process used before is not counted twice
    ],
)
def test_the_clock_advances_as_fast_as_the_ranks_get_processors(
    wall: list[float], usage: Usage, advance: float
) -> None:
    clock = ActiveClock(lambda: usage)
    wall.append(110.0)
    assert clock.read() == advance
    wall.append(110.1)  # too early for another measurement
    assert clock.read() == advance
    assert clock.not_counted == 10.0 - advance
    wall.append(120.0)
    clock.read()
    assert clock.describe_machine(10.0 - advance).not_counted == pytest.approx(10.0 - advance)


def test_another_process_reads_the_published_time_and_stops_when_nothing_is_published(
    wall: list[float], tmp_path: Path
) -> None:
    clock = ActiveClock(lambda: Usage(ran=1.0, waited=3.0), tmp_path / "clock")
    there = PublishedClock(tmp_path / "clock")
    wall.append(104.0)
    assert there.read() == 1.0
    assert (clock.read(), there.read()) == (1.0, 1.0)
    wall.append(104.5)
    assert there.read() == 1.5
    wall.append(904.0)
    assert there.read() == 2.0


def test_a_sleep_ends_with_its_condition_or_its_time(
    wall: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks.time, "sleep", lambda seconds: wall.append(wall[-1] + seconds))
    clock = ActiveClock(lambda: Usage(ran=0.0, waited=0.0))
    assert clock.sleep(5.0, until=lambda: wall[-1] > 101.0)
    assert not clock.sleep(5.0)
    assert 105.9 < wall[-1] < 106.6


def test_the_processes_below_a_launcher_count_and_not_the_launcher() -> None:
    tree = ProcessTree()
    assert tree.measure() == Usage(0.0, 0.0)
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        child = int(shell.stdout.readline())
        tree.root = shell.pid
        assert tree.list_processes() == [child]
        assert tree.measure().ran <= read_usage(child).ran
        subprocess.run(["kill", str(child)], check=True)
    assert tree.list_processes() == []
    assert read_usage(child) == Usage(0.0, 0.0)


def test_a_slow_clock_delays_the_dump_of_a_rank_that_holds_the_lock(
    wall: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    armed: list[float] = []
    name = "moeverify.verification.launch.failure_reporter.faulthandler"
    monkeypatch.setattr(f"{name}.dump_traceback_later", lambda left, **_: armed.append(left))
    monkeypatch.setattr(f"{name}.cancel_dump_traceback_later", lambda: armed.append(0.0))
    with (tmp_path / "stack").open("wb") as file:
        monkeypatch.setattr(
            "moeverify.verification.launch.failure_reporter.leave_traces", lambda *_, **named: file
        )
        reporter = FailureReporter(tmp_path, 0, CollectiveTrace(), catch_terminate=False)
        reporter.arm(10.0)
        wall.append(105.0)
        reporter.follow(5.5)
        assert armed == [13.0]
        reporter.follow(9.0)
        assert armed == [13.0, 12.0]
        reporter.disarm()
        reporter.follow(100.0)  # the thread of the watchdog was late
        assert armed == [13.0, 12.0, 0.0]


def test_a_limit_is_told_with_its_option_and_the_load_of_the_machine() -> None:
    machine = MachineLoad(load=41.26, num_processors=2, not_counted=2260.4)
    failure = JobFailure(
        cause=FailureCause.NOT_IN_TIME, timeout=180.0, machine=machine, not_up={1: "a.py:3 in f"}
    )
    assert describe_failure(failure) == (
        "rank 1, which is at a.py:3 in f, did not come up within 180 s (raise --timeout; load 41.3 on 2 processors; "
        "2260 s of waiting for a processor not counted)"
    )

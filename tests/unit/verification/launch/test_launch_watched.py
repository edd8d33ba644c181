"""A watcher of a script's ranks, by the files of ranks that exist only on paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from moeverify.results.failure import JobFailure
from moeverify.scripts.record.command import run_command
from moeverify.scripts.record.hangs import HangReporter, HangSettings
from moeverify.verification.collectives.flight_recorder import FlightFile
from moeverify.verification.launch.clock import ActiveClock
from moeverify.verification.launch.watched import WatchedRanks


class Ranks:
    """Two ranks of one group, whose processes are gone."""

    def __init__(self, folder: Path) -> None:
        self.files = [FlightFile(folder / f"rank-{rank}.flight") for rank in range(2)]

    def begin(self, rank: int, number: int) -> None:
        record = {
            "number": number,
            "op": "all_reduce",
            "group": [0, 1],
            "group_name": "0",
            "sequence": number,
        }
        self.files[rank].write(number, json.dumps({**record, "site": f"a.py:{number} in f"}).encode())

    def end(self, rank: int, number: int) -> None:
        self.files[rank].finish(number, success=True)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose last element is the time of the clock."""
    times = [0.0]
    monkeypatch.setattr(ActiveClock, "read", lambda clock: times[-1])
    return times


def describe(failure: JobFailure | None) -> list[tuple[tuple[int, ...], int, list[int]]] | None:
    """Return the ranks that wait, the number of their collective, and the absent ranks, of each wait."""
    if failure is None or failure.hang is None:
        return None
    waits = failure.hang.waits
    return [
        (wait.ranks, wait.collective.number, [each.rank for each in wait.absent if each.waiting.has_ended])
        for wait in waits
    ]


def is_running(pid: int) -> bool:
    """Return whether a process runs: an orphan that has ended may wait for its reaper."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_collective_is_reported_once_and_only_while_it_is_pending(tmp_path: Path, now: list[float]) -> None:
    ranks, watched = Ranks(tmp_path), WatchedRanks(tmp_path, 60.0)
    for rank in range(2):
        ranks.begin(rank, 1)
    ranks.end(1, 1)
    assert watched.look() is None
    now.append(59.0)
    assert watched.look() is None
    now.append(60.0)
    assert describe(watched.look()) == [((0,), 1, [1])]
    now.append(600.0)
    assert watched.look() is None
    ranks.end(0, 1)
    assert watched.look() is None
    now.append(1200.0)  # they compute
    assert watched.look() is None
    ranks.begin(1, 2)
    assert watched.look() is None
    now.append(1260.0)
    assert describe(watched.look()) == [((1,), 2, [0])]


def test_ranks_that_go_on_hide_no_rank_that_does_not(tmp_path: Path, now: list[float]) -> None:
    ranks, watched = Ranks(tmp_path), WatchedRanks(tmp_path, 60.0)
    ranks.begin(0, 1)
    for number in range(1, 4):
        ranks.begin(1, number)
        ranks.end(1, number)
        assert watched.look() is None
        now.append(now[-1] + 25.0)
    assert describe(watched.look()) == [((0,), 1, [1])]


def test_a_script_without_ranks_has_no_end_to_report(tmp_path: Path) -> None:
    assert WatchedRanks(tmp_path, 60.0).end() is None


def test_a_hang_ends_the_script_and_the_processes_that_outlive_it(tmp_path: Path) -> None:
    reports: list[Sequence[str]] = []
    Ranks(tmp_path).begin(0, 1)
    hangs = HangReporter(tmp_path, HangSettings(limit=0.1, stops=True), reports.append)
    script = f"trap 'exit 7' TERM; sleep 1000 & echo $! > {tmp_path}/pid; wait"
    assert run_command(["sh", "-c", script], {}, hangs) == 7
    assert hangs.has_ended_script
    ((head, wait),) = reports
    assert head.startswith("a collective has waited for 0.1 s (raise --hang; load ")
    assert wait == (
        "rank 0 waits in all_reduce #1 of group (0,1) called at a.py:1 in f; "
        "rank 1 never entered it: its process has ended"
    )
    assert not is_running(int((tmp_path / "pid").read_text()))

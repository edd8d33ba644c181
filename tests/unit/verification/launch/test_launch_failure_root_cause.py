"""Choice of the rank whose report comes first."""

from __future__ import annotations

from moeverify.report.words.failure import describe_failure
from moeverify.results.failure import EndKind, RankEnd
from moeverify.results.run import RankReport
from moeverify.verification.launch.failure_root_cause import find_root_cause

RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"


def make_report(rank: int, how: EndKind, error: str = "", signal: int | None = None) -> RankReport:
    return RankReport.of(rank, RankEnd(how=how, error=error, signal=signal))


def find(*reports: RankReport, times: dict[int, float] | None = None) -> tuple[str, list[tuple[int, str]]]:
    cause = find_root_cause(reports, times or {}, {report.rank: [] for report in reports})
    order = [(report.rank, report.state) for report in cause.reports]
    return describe_failure(cause.make_failure()), order


def test_an_error_comes_before_the_connections_that_it_broke() -> None:
    summary, order = find(
        make_report(0, EndKind.RAISED, RESET),
        make_report(1, EndKind.STOPPED),
        make_report(2, EndKind.RAISED, "ValueError: no"),
        times={0: 1.0, 2: 2.0},
    )
    assert order == [(2, "raised"), (0, "stopped"), (1, "stopped")]
    assert summary == "rank 2 raised ValueError: no"


def test_a_killed_rank_explains_broken_connections() -> None:
    summary, order = find(make_report(0, EndKind.RAISED, RESET), make_report(1, EndKind.KILLED, signal=9))
    assert order == [(1, "killed"), (0, "stopped")]
    assert summary == "rank 1 was killed by SIGKILL (kill -9, or the kernel when memory ran out)"


def test_a_broken_connection_that_nothing_explains_stays_an_error() -> None:
    _, order = find(make_report(0, EndKind.STOPPED), make_report(1, EndKind.RAISED, RESET))
    assert order == [(1, "raised"), (0, "stopped")]


def test_of_several_errors_the_earliest_comes_first() -> None:
    reports = [make_report(rank, EndKind.RAISED, f"ValueError: {rank}") for rank in range(3)]
    _, order = find(*reports, times={0: 3.0, 1: 1.0, 2: 2.0})
    assert [rank for rank, _ in order] == [1, 2, 0]

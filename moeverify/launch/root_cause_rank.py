"""On which rank a failure began: the reports of all ranks in, these in order and what they share out. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeverify.collectives.hang import Traces, find_disagreement, find_waits
from moeverify.launch.stack import find_place
from moeverify.results.failure import Cause, Disagreement, End, Hang, JobFailure, RankEnd
from moeverify.results.run import RankReport

NUM_RECENT = 16
"""How many of its last collectives a rank's report has: a picture's width of them."""

_ORDER = {"killed": 0, "lost": 1, "raised": 2, "hung": 3, "stopped": 4}
# What a backend says in a rank whose peer has gone.
_BROKEN = re.compile(
    r"gloo/transport|Connection (reset|closed|refused)|Broken pipe|ncclRemoteError|remote process exited|"
    r"NCCL communicator was aborted|recvValue failed|failed to recv"
)


@dataclass(frozen=True)
class Origin:
    """The reports of all ranks, those where it began first; a hang, and collectives that ranks disagree on."""

    reports: tuple[RankReport, ...]
    hang: Hang | None = None
    disagreement: Disagreement | None = None

    @property
    def is_hang(self) -> bool:
        """Return whether a rank was over its time."""
        return any(report.state == "hung" for report in self.reports)

    def make_failure(self, cause: Cause = Cause.RANK, **rest: object) -> JobFailure:
        """Return the failure of a job that began here."""
        first = self.reports[0]
        content = {"rank": first.rank, "end": first.end, "hang": self.hang, "disagreement": self.disagreement}
        return JobFailure.model_validate({"cause": cause, **content, **rest})


def find_origin(reports: Sequence[RankReport], times: Mapping[int, float], traces: Traces) -> Origin:
    """Return where a failure began.

    `times` says when a rank wrote its report, where it did.
    """
    ordered = _mark_consequences(reports)
    hang = None
    late: Sequence[int] = []
    if any(report.state == "hung" for report in ordered):
        view = find_waits(traces, {report.rank: find_place(report.stack) for report in ordered})
        hang, late = view.hang, view.late
        ordered = [
            report.ending(report.end.model_copy(update={"waiting": view.waiting[report.rank]}))
            if report.state == "hung" and report.end is not None
            else report
            for report in ordered
        ]
    newest = max(times.values(), default=0.0)
    ordered.sort(
        key=lambda report: (
            report.rank not in late,
            _ORDER[report.state],
            times.get(report.rank, newest),
            report.rank,
        )
    )
    reports = [
        report.model_copy(update={"recent": tuple(traces.get(report.rank, ())[-NUM_RECENT:])})
        for report in ordered
    ]
    return Origin(tuple(reports), hang, find_disagreement(traces))


def _mark_consequences(reports: Sequence[RankReport]) -> list[RankReport]:
    """Turn exceptions that only say that a peer has gone into `stopped`, if some other rank explains them."""
    errors = {report.rank: report.end.error for report in reports if report.end and report.state == "raised"}
    broken = {rank for rank, error in errors.items() if _BROKEN.search(error)}
    if all(report.rank in broken or report.state == "stopped" for report in reports):
        return list(reports)
    return [
        report.ending(RankEnd(how=End.BROKE_OFF, error=errors[report.rank]))
        if report.rank in broken
        else report
        for report in reports
    ]

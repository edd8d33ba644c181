"""Root cause of a failure: orders the reports of all ranks by likely cause. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeverify.results.failure import Disagreement, EndKind, FailureCause, Hang, JobFailure, RankEnd
from moeverify.results.run import RankReport
from moeverify.verification.collectives.hang import Traces, find_disagreement, find_waits
from moeverify.verification.launch.tracebacks import find_place

NUM_RECENT = 16
"""Number of the last collectives kept in the report of a rank: as many as fit the width of the diagram."""

_ENDED = (EndKind.RAISED, EndKind.BROKE_OFF, EndKind.CRASHED, EndKind.KILLED, EndKind.EXITED, EndKind.LEFT)
_ORDER = {"killed": 0, "lost": 1, "raised": 2, "hung": 3, "stopped": 4}
# Messages of a backend in a rank whose peer is gone.
_BROKEN = re.compile(
    r"gloo/transport|Connection (reset|closed|refused)|Broken pipe|ncclRemoteError|remote process exited|"
    r"NCCL communicator was aborted|recvValue failed|failed to recv"
)


@dataclass(frozen=True)
class RootCause:
    """The reports of all ranks, the originating ranks first, with a hang or disagreement if any."""

    reports: tuple[RankReport, ...]
    hang: Hang | None = None
    disagreement: Disagreement | None = None

    @property
    def is_hang(self) -> bool:
        """Return whether a rank timed out."""
        return any(report.state == "hung" for report in self.reports)

    def make_failure(self, cause: FailureCause = FailureCause.RANK, **rest: object) -> JobFailure:
        """Return the failure of a job with this root cause. `rest` overrides or adds fields of `JobFailure`."""
        first = self.reports[0]
        content = {"rank": first.rank, "end": first.end, "hang": self.hang, "disagreement": self.disagreement}
        return JobFailure.model_validate({"cause": cause, **content, **rest})


def find_root_cause(
    reports: Sequence[RankReport], times: Mapping[int, float], traces: Traces, *, is_watched: bool = False
) -> RootCause:
    """Return the root cause of a failure.

    `times` maps a rank to the time at which it wrote its report, if it did. `traces` maps a rank to its
    collectives. With `is_watched`, the waits of the ranks are returned even if none timed out: a script of the
    user may end by a timeout of its own, or by a signal.
    """
    ordered = _mark_consequences(reports)
    hang = None
    late: Sequence[int] = []
    if is_watched or any(report.state == "hung" for report in ordered):
        places = {report.rank: find_place(report.stack) for report in ordered}
        ended = {report.rank for report in ordered if report.end is not None and report.end.how in _ENDED}
        view = find_waits(traces, places, ended)
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
    return RootCause(tuple(reports), hang, find_disagreement(traces))


def _mark_consequences(reports: Sequence[RankReport]) -> list[RankReport]:
    """Mark exceptions that only report a lost peer as `stopped`, if another rank explains them."""
    errors = {report.rank: report.end.error for report in reports if report.end and report.state == "raised"}
    broken = {rank for rank, error in errors.items() if _BROKEN.search(error)}
    if all(report.rank in broken or report.state == "stopped" for report in reports):
        return list(reports)
    return [
        report.ending(RankEnd(how=EndKind.BROKE_OFF, error=errors[report.rank]))
        if report.rank in broken
        else report
        for report in reports
    ]

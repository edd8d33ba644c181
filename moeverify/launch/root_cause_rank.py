"""On which rank a failure began: the reports of all ranks in, these in order and a summary out. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from moeverify.collectives.words import Record, explain_disagreement, explain_hang
from moeverify.launch.stack import find_place
from moeverify.results.run import RankReport

_ORDER = {"killed": 0, "lost": 1, "raised": 2, "hung": 3, "stopped": 4}
# What a backend says in a rank whose peer has gone.
_BROKEN = re.compile(
    r"gloo/transport|Connection (reset|closed|refused)|Broken pipe|ncclRemoteError|remote process exited|"
    r"NCCL communicator was aborted|recvValue failed|failed to recv"
)


def find_origin(
    reports: Sequence[RankReport],
    times: Mapping[int, float],
    records: Mapping[int, Sequence[Record]],
) -> tuple[str, tuple[RankReport, ...]]:
    """Return the failure in words, and the reports, those where it began first.

    `times` says when a rank wrote its report, where it did; `records` holds the ranks' traces.
    """
    ordered = _mark_consequences(reports)
    summary = ""
    late: list[int] = []
    if any(report.state == "hung" for report in ordered):
        places = {report.rank: find_place(report.stack) for report in ordered}
        summary, doings, late = explain_hang(records, places)
        ordered = [
            report.model_copy(update={"summary": f"{report.summary}: {doings[report.rank]}"})
            if report.state == "hung"
            else report
            for report in ordered
        ]
    if disagreement := explain_disagreement(records):
        summary = f"{summary}. {disagreement}" if summary else disagreement
    newest = max(times.values(), default=0.0)
    ordered.sort(
        key=lambda report: (
            report.rank not in late,
            _ORDER[report.state],
            times.get(report.rank, newest),
            report.rank,
        )
    )
    if not any(report.state == "hung" for report in ordered):
        first = ordered[0]
        verb = "raised " if first.state == "raised" else ""
        failed = f"rank {first.rank} {verb}{first.summary}"
        summary = f"{failed}. {summary}" if summary else failed
    return summary, tuple(ordered)


def _mark_consequences(reports: Sequence[RankReport]) -> list[RankReport]:
    """Turn exceptions that only say that a peer has gone into `stopped`, if some other rank explains them."""
    broken = {
        report.rank for report in reports if report.state == "raised" and _BROKEN.search(report.summary)
    }
    if all(report.rank in broken or report.state == "stopped" for report in reports):
        return list(reports)
    return [
        report.model_copy(
            update={"state": "stopped", "summary": f"broke off with its peer: {report.summary}"}
        )
        if report.rank in broken
        else report
        for report in reports
    ]

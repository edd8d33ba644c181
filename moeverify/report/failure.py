"""A short description of a failed case: cause, first step, place, size and evidence."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.report.failed_ranks import group_ranks
from moeverify.report.finding_rows import describe_finding, name_finding, name_tensor
from moeverify.report.numbers import format_ranks
from moeverify.report.sorting import order_findings
from moeverify.report.words.cause import (
    describe_cause,
    describe_evidence,
    describe_where,
    leads_with_culprit,
)
from moeverify.report.words.culprit import list_source
from moeverify.results.run import CaseResult, RankReport

FIRST_FACTS = ("since", "first tensor", "where", "source", "seen in")
"""Labels of the facts that say where to look; a page shows the next commands after them."""

_MOST_EVIDENCE = 3
_MOST_GROUPS = 2
_MOST_SOURCE = 6  # lines around the operation


def name_failure(case: CaseResult) -> str:
    """Return the cause of the first finding, or the best available substitute."""
    first = next(iter(order_findings(case.findings)), None)
    if first is None:
        hung = _find_hung(case)
        return f"rank {hung.rank} {hung.state}: {hung.summary}" if hung else case.reason or "A rank failed."
    return describe_cause(first) or f"{name_finding(first)} differs; no cause was found"


def describe_failure(case: CaseResult) -> Iterator[tuple[str, str]]:
    """Yield (label, text) pairs of the first finding, or of the failed ranks if there is no finding."""
    if not case.findings:
        if _find_hung(case):
            yield "reason", case.reason
        for group in group_ranks(case.rank_reports)[:_MOST_GROUPS]:
            said = "; ".join(text for text, _ in group.summaries)
            yield format_ranks(group.ranks), f"{group.state}{': ' if said else ''}{said}"
        return
    first = order_findings(case.findings)[0]
    yield "since", f"step {first.step}" if first.step >= 0 else "before the first step"
    yield "first tensor", name_tensor(first.check, first.tensor)
    if where := describe_where(first):
        yield "where", where
    if first.culprit is not None:
        label = "source" if leads_with_culprit(first) else "seen in"
        for line in list_source(first.culprit)[:_MOST_SOURCE]:
            yield label, line
    for label, text in describe_finding(first):
        if label in ("error", "rank", "scale", "follow-up"):
            yield label, text
    for line in describe_evidence(first)[:_MOST_EVIDENCE]:
        yield "evidence", line
    num_following = sum(bool(finding.follows) for finding in case.findings)
    yield "findings", f"{len(case.findings)}, of which {num_following} follow from others"


def _find_hung(case: CaseResult) -> RankReport | None:
    """Return the rank in no collective for which others wait; the reason of a hang describes all ranks."""
    first = next(iter(case.rank_reports), None)
    waiting = first.end.waiting if first is not None and first.end is not None else None
    return first if waiting is not None and waiting.collective is None else None

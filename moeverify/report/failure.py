"""A case that failed in a few words: the cause, since when, where, how much, and why."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.report.finding_rows import describe_finding, name_finding, name_tensor
from moeverify.report.numbers import format_ranks
from moeverify.report.sorting import order_findings
from moeverify.report.stacks import group_ranks
from moeverify.report.words.cause import describe_cause, describe_evidence, describe_where
from moeverify.results.run import CaseResult

_MOST_EVIDENCE = 3
_MOST_GROUPS = 2


def name_failure(case: CaseResult) -> str:
    """Return the cause of the first finding, or else what is known instead of it."""
    first = next(iter(order_findings(case.findings)), None)
    if first is None:
        return case.reason or "A rank failed."
    return describe_cause(first) or f"{name_finding(first)} differs; no cause was found"


def describe_failure(case: CaseResult) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the first finding, or of the ranks of a case that has none."""
    if not case.findings:
        for group in group_ranks(case.rank_reports)[:_MOST_GROUPS]:
            said = "; ".join(text for text, _ in group.summaries)
            yield format_ranks(group.ranks), f"{group.state}{': ' if said else ''}{said}"
        return
    first = order_findings(case.findings)[0]
    yield "since", f"step {first.step}" if first.step >= 0 else "before the first step"
    yield "first tensor", name_tensor(first.check, first.tensor)
    if where := describe_where(first):
        yield "where", where
    for label, text in describe_finding(first):
        if label in ("error", "rank", "scale", "follow-up"):
            yield label, text
    for line in describe_evidence(first)[:_MOST_EVIDENCE]:
        yield "evidence", line
    num_following = sum(bool(finding.follows) for finding in case.findings)
    yield "findings", f"{len(case.findings)}, of which {num_following} follow from others"

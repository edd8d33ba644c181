"""The order of reports: the worst check of a case, and findings by step, those with a known cause first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moeverify.report.numbers import excess
from moeverify.results.comparable import comparable
from moeverify.results.finding import CheckResult, Finding, Verdict
from moeverify.results.run import CaseResult, RunResult

# As a reader wants them in a summary, the best news first.
VERDICTS: tuple[Verdict, ...] = ("pass", "mismatch", "error", "skipped")


def find_worst_check(case: CaseResult) -> CheckResult | None:
    """Return the check whose worst tensor uses most of its bound, a failed check before any other."""
    measured = [check for check in case.checks if check.worst is not None]
    return max(measured, key=_rank_check, default=None)


def _rank_check(check: CheckResult) -> tuple[bool, float, float]:
    """Return the sort key of a check; among checks with nothing to separate them the larger error wins."""
    if check.worst is None:
        return (False, 0.0, 0.0)
    share = excess(check.worst.error, check.worst.bound)
    return (check.verdict == "mismatch", comparable(share), comparable(check.worst.error))


def order_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, what began it before what follows from it.

    Then by step, the earliest first; in a step those whose cause is known: the one that the diagnosis has put first,
    since it may be what makes the others, then by excess.
    """
    lead = next((finding for finding in findings if not finding.follows), None)

    def rank(finding: Finding) -> tuple[bool, int, bool, bool, float]:
        is_open = not finding.is_explained
        error = -comparable(excess(finding.error, finding.bound))
        return bool(finding.follows), finding.step, is_open, finding is not lead, error

    return sorted(findings, key=rank)


def count_tensors(case: CaseResult) -> int:
    """Return how many logical tensors were compared, summed over the checks."""
    return sum(check.tensors for check in case.checks)


def count_verdicts(run: RunResult) -> dict[Verdict, int]:
    """Return the number of cases of each verdict, without the verdicts that no case has."""
    counts = Counter(case.verdict for case in run.cases)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def group_texts(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Return (text, names) from (name, text), in order of appearance: what many cases say is said once."""
    groups: dict[str, list[str]] = {}
    for name, text in pairs:
        groups.setdefault(text, []).append(name)
    return list(groups.items())

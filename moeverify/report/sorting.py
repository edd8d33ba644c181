"""Orders of reports: the worst check of a case; findings by step, explained ones first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moeverify.report.numbers import excess
from moeverify.results.comparable import comparable
from moeverify.results.finding import CheckResult, Finding, Verdict
from moeverify.results.run import CaseResult, RunResult

# Order of verdicts in a summary.
VERDICTS: tuple[Verdict, ...] = ("pass", "mismatch", "undecided", "error", "skipped")


def find_worst_check(case: CaseResult) -> CheckResult | None:
    """Return the check whose worst tensor uses most of its bound; failed checks take precedence."""
    measured = [check for check in case.checks if check.worst is not None]
    return max(measured, key=_rank_check, default=None)


def _rank_check(check: CheckResult) -> tuple[bool, float, float]:
    """Return the sort key of a check: failed, then share of the bound, then error."""
    if check.worst is None:
        return (False, 0.0, 0.0)
    share = excess(check.worst.error, check.worst.bound)
    return (check.verdict == "mismatch", comparable(share), comparable(check.worst.error))


def order_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings in report order: roots first, then findings that follow from others.

    Within these, findings are ordered by step. Within a step, findings with a known cause come first. Among
    them the finding that the diagnosis put first leads, since it may cause the others. The rest is ordered
    by error / bound, largest first.
    """
    lead = next((finding for finding in findings if not finding.follows), None)

    def rank(finding: Finding) -> tuple[bool, int, bool, bool, float]:
        is_open = not finding.is_explained
        error = -comparable(excess(finding.error, finding.bound))
        return bool(finding.follows), finding.step, is_open, finding is not lead, error

    return sorted(findings, key=rank)


def count_tensors(case: CaseResult) -> int:
    """Return the number of compared logical tensors, summed over the checks."""
    return sum(check.tensors for check in case.checks)


def count_verdicts(run: RunResult) -> dict[Verdict, int]:
    """Return the number of cases per verdict, omitting verdicts without cases."""
    counts = Counter(case.verdict for case in run.cases)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def group_texts(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Return (text, names) groups from (name, text) pairs, in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for name, text in pairs:
        groups.setdefault(text, []).append(name)
    return list(groups.items())

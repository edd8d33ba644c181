"""A run as CSV: one row per check of each case."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from moeverify.report.files import write_atomically
from moeverify.report.sanitize import clean
from moeverify.report.sorting import order_findings
from moeverify.report.words.cause import describe_cause
from moeverify.results.finding import CheckResult
from moeverify.results.run import CaseResult, RunResult

COLUMNS = (
    "case",
    "file",
    "verdict",
    "reason",
    "ranks",
    "seconds",
    "check",
    "check_verdict",
    "tensors",
    "inconclusive",
    "decided",
    "worst_tensor",
    "step",
    "error",
    "bound",
    "findings",
    "cause",
)


def write(run: RunResult, path: Path) -> None:
    """Write the run's CSV to `path` atomically.

    Raises: OSError when writing fails.
    """
    write_atomically(path, format_csv(run))


def format_csv(run: RunResult) -> str:
    """Return a header and the rows of all cases; a case without checks has one row.

    Numbers are written in full precision.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for case in run.cases:
        for row in _list_rows(case):
            writer.writerow(
                {name: clean(value) if isinstance(value, str) else value for name, value in row.items()}
            )
    return text.getvalue()


def _list_rows(case: CaseResult) -> Iterator[dict[str, object]]:
    about: dict[str, object] = {
        "case": case.name,
        "file": case.file,
        "verdict": case.verdict,
        "reason": case.reason,
        "ranks": case.ranks,
        "seconds": round(case.seconds, 3),
    }
    if not case.checks:
        yield about
    for check in case.checks:
        yield about | _describe_check(case, check)


def _describe_check(case: CaseResult, check: CheckResult) -> dict[str, object]:
    findings = [finding for finding in order_findings(case.findings) if finding.check == check.name]
    causes = (describe_cause(finding) for finding in findings if not finding.follows)
    row: dict[str, object] = {
        "check": check.name,
        "check_verdict": check.verdict,
        "tensors": check.tensors,
        "inconclusive": check.inconclusive,
        "decided": "" if check.decided is None else check.decided.decided,
        "findings": len(findings),
        "cause": next(filter(None, causes), ""),
    }
    if check.worst is not None:
        worst = check.worst
        row |= {"worst_tensor": worst.tensor, "step": worst.step, "error": worst.error, "bound": worst.bound}
    return row

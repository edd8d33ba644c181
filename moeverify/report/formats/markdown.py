"""A run as Markdown: failures and a table of all cases, for a CI job summary or a comment."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from moeverify.report.failure import describe_failure, name_failure
from moeverify.report.files import write_atomically
from moeverify.report.markdown import make_markdown_table
from moeverify.report.next_steps import Kept, advise
from moeverify.report.numbers import format_bound, format_count, format_number, format_seconds
from moeverify.report.sanitize import clean
from moeverify.report.sorting import count_tensors, count_verdicts, find_worst_check
from moeverify.results.run import CaseResult, RunResult

# GitHub accepts one megabyte per step.
_MOST_FAILURES = 20
_MOST_ROWS = 1000
_MOST_TEXT = 2000
_SPECIAL = re.compile(r"([\\`*_\[\]~#])")


def write(run: RunResult, path: Path) -> None:
    """Write the run's summary to `path` atomically.

    Raises: OSError when writing fails.
    """
    write_atomically(path, format_markdown(run))


def format_markdown(run: RunResult) -> str:
    """Return the summary; special characters in names are escaped."""
    counts = ", ".join(f"{number} {verdict}" for verdict, number in count_verdicts(run).items())
    tensors = sum(map(count_tensors, run.cases))
    failed = [case for case in run.cases if case.has_failed]
    lines = [
        f"## moeverify: {run.verdict}",
        "",
        f"{format_count(len(run.cases), 'case')}: {counts}; {format_count(tensors, 'tensor')} compared; "
        f"{format_seconds(run.seconds)}",
        "",
    ]
    for case in failed[:_MOST_FAILURES]:
        lines += _list_failure(case, run.command)
    if len(failed) > _MOST_FAILURES:
        lines += [f"{format_count(len(failed) - _MOST_FAILURES, 'more case')} failed.", ""]
    undecided = [case for case in run.cases if case.verdict == "undecided"]
    lines += [f"- {_escape(case.name)} is undecided: {_escape(case.reason)}" for case in undecided]
    lines += [""] if undecided else []
    ordered = [*failed, *(case for case in run.cases if not case.has_failed)]
    rows = [_make_row(case) for case in ordered[:_MOST_ROWS]]
    if rows:
        table = make_markdown_table(("case", "verdict", "ranks", "tensors", "worst / bound", "s"), rows)
        lines += ["<details><summary>All cases</summary>", "", table, "", "</details>", ""]
    if len(ordered) > _MOST_ROWS:
        lines += [f"{format_count(len(ordered) - _MOST_ROWS, 'more case')} not listed.", ""]
    return "\n".join(lines)


def _list_failure(case: CaseResult, command: str) -> Iterator[str]:
    yield f"### {_escape(case.name)}: {case.verdict}"
    yield ""
    yield f"**{_escape(name_failure(case))}**"
    yield ""
    facts = [(label, _escape(text)) for label, text in describe_failure(case)]
    about = [("file", case.file), ("recipe", case.recipe), ("layout", case.layout)]
    facts += [(label, _escape(text)) for label, text in about if text]
    yield make_markdown_table(("", ""), facts)
    yield ""
    for words, purpose in advise(case, command, Kept())[:1]:
        yield f"Next, {_escape(purpose)}:"
        yield ""
        yield from (f"    {line}" for line in clean(words).splitlines())
        yield ""


def _make_row(case: CaseResult) -> tuple[str, ...]:
    worst = find_worst_check(case)
    numbers = ""
    if worst is not None and worst.worst is not None:
        numbers = f"{format_number(worst.worst.error)} / {format_bound(worst.worst.bound)}"
    seconds = f"{case.seconds:.1f}" if case.verdict != "skipped" else ""
    return _escape(case.name), case.verdict, str(case.ranks), str(count_tensors(case)), numbers, seconds


def _escape(text: str) -> str:
    """Return the text on one line, escaped for Markdown and HTML; the table escapes bars."""
    line = " ".join(clean(text)[:_MOST_TEXT].split())
    return _SPECIAL.sub(r"\\\1", html.escape(line, quote=False))

"""Kept runs in chronological order: verdicts, and the largest error relative to its bound."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moeverify.cases.select import read_pattern
from moeverify.errors import FormatError
from moeverify.report.console import new_table, print_table, style_verdict
from moeverify.report.finding_rows import name_tensor
from moeverify.report.formats.json import RUN_FILE, read_run
from moeverify.report.numbers import excess, format_number
from moeverify.report.progress import OnPart
from moeverify.report.sanitize import clean, elide
from moeverify.report.sorting import find_worst_check
from moeverify.results.finding import Verdict
from moeverify.results.run import CaseResult, RunResult

_MOST_NAME = 24


@dataclass(frozen=True)
class KeptRun:
    """One kept run, restricted to the selected cases; `share` is its largest error over its bound."""

    name: str
    started: str
    verdict: Verdict
    num_passed: int
    num_ran: int
    share: float | None
    worst: str
    seconds: float


def list_runs(
    folder: Path, pattern: str | None = None, on_file: OnPart = lambda *_: None
) -> tuple[list[KeptRun], list[str]]:
    """Return the runs that `--out` and `--json` left in a folder, oldest first, and why others were skipped.

    `pattern` selects cases by words in their names; runs without such a case are left out. `on_file` receives
    how many files are read, and how many there are.

    Raises: CaseError when the pattern is invalid.
    """
    matches = read_pattern(pattern)
    runs: list[KeptRun] = []
    problems: list[str] = []
    files = list(_find_files(folder))
    for num_done, path in enumerate(files):
        on_file(num_done, len(files))
        try:
            run = read_run(path)
        except FormatError as error:
            problems.append(str(error))
            continue
        cases = [case for case in run.cases if matches(case.name)]
        if cases:
            name = path.parent.name if path.name == RUN_FILE and path.parent != folder else path.name
            runs.append(_summarize(name, run, cases))
    return sorted(runs, key=lambda kept: (kept.started, kept.name)), problems


def _find_files(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*.json"))
    yield from sorted(folder.glob(f"*/{RUN_FILE}"))


def _summarize(name: str, run: RunResult, cases: Sequence[CaseResult]) -> KeptRun:
    ran = [case for case in cases if case.verdict != "skipped"]
    verdicts = {case.verdict for case in ran}
    order: tuple[Verdict, ...] = ("error", "mismatch", "undecided", "pass")
    share, worst = None, ""
    for case in ran:
        check = find_worst_check(case)
        if check is None or check.worst is None:
            continue
        own = excess(check.worst.error, check.worst.bound)
        if share is None or own > share:
            share, worst = own, f"{case.name}, {name_tensor(check.name, check.worst.tensor)}"
    return KeptRun(
        name=name,
        started=re.sub(r"(\d)T(\d\d:\d\d).*", r"\1 \2", run.started),
        verdict=next((verdict for verdict in order if verdict in verdicts), "skipped"),
        num_passed=sum(case.verdict == "pass" for case in ran),
        num_ran=len(ran),
        share=share,
        worst=worst,
        seconds=sum(case.seconds for case in ran),
    )


def render_history(runs: Sequence[KeptRun], console: Console) -> None:
    """Print one row per run."""
    rows = [
        (
            clean(kept.started),
            elide(clean(kept.name), _MOST_NAME),
            f"{kept.num_passed} of {kept.num_ran}",
            "-" if kept.share is None else format_number(kept.share),
            f"{kept.seconds:.1f}",
        )
        for kept in runs
    ]
    headers = ("started", "run", "passed", "error / bound", "s")
    widths = [max(map(len, column)) + 2 for column in zip(headers, *rows, strict=True)]
    room = console.width - sum(widths) - len("undecided") - 3
    table = new_table(console)
    for header in headers:
        table.add_column(header, justify="left" if header in ("started", "run") else "right")
    table.add_column("verdict")
    if room >= _MOST_NAME:
        table.add_column("worst", no_wrap=True)
    for kept, row in zip(runs, rows, strict=True):
        cells = [*map(Text, row), style_verdict(kept.verdict)]
        table.add_row(*cells, *([Text(elide(clean(kept.worst), room))] if room >= _MOST_NAME else []))
    print_table(table, console)

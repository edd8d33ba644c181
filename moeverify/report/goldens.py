"""Console output of the status of each golden."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from moeverify.report.console import print_lines
from moeverify.report.numbers import format_count
from moeverify.report.sanitize import clean
from moeverify.report.words.note import describe_row
from moeverify.results.golden import GoldenRow

_STYLES = {
    "recorded": "green",
    "refreshed": "yellow",
    "unchanged": "",
    "missing": "bold red",
    "differs": "bold red",
    "unused": "yellow",
}


def is_stale(rows: Sequence[GoldenRow]) -> bool:
    """Return whether a golden is missing, differs from this machine's result, or belongs to no case."""
    return any(row.status in ("missing", "differs", "unused") for row in rows)


def render_goldens(rows: Sequence[GoldenRow], console: Console) -> None:
    """Print one line per golden, and a last line with the counts."""
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        line = Text.assemble((f"{row.status:<10}", _STYLES[row.status]), f"{clean(row.name):<{width}}")
        detail = describe_row(row)
        line.append(f"  {clean(detail)}" if detail else "")
        line.rstrip()
        print_lines(console, line)
    counts = Counter(row.status for row in rows)
    statuses = ", ".join(f"{number} {status}" for status, number in counts.items())
    print_lines(console, Text(f"{format_count(len(rows), 'golden')}{': ' if statuses else ''}{statuses}"))

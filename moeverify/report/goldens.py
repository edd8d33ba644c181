"""The outcome for each golden, on the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, Protocol

from rich.console import Console
from rich.text import Text

from moeverify.report.console import print_lines
from moeverify.report.numbers import format_count
from moeverify.report.sanitize import clean

Status = Literal["recorded", "refreshed", "unchanged", "missing", "differs", "unused"]

_STYLES = {
    "recorded": "green",
    "refreshed": "yellow",
    "unchanged": "",
    "missing": "bold red",
    "differs": "bold red",
    "unused": "yellow",
}


class GoldenRow(Protocol):
    """One golden: its file or recipe, what became of it, and in words what changed."""

    @property
    def name(self) -> str:
        """Return the file or the recipe."""

    @property
    def status(self) -> Status:
        """Return what became of it; `missing` and `differs` are only found when nothing may be written."""

    @property
    def detail(self) -> str:
        """Return what changed, or nothing."""


def is_stale(rows: Sequence[GoldenRow]) -> bool:
    """Return whether a golden is missing, is not what this machine computes, or belongs to no case."""
    return any(row.status in ("missing", "differs", "unused") for row in rows)


def render_goldens(rows: Sequence[GoldenRow], console: Console) -> None:
    """Print a line for each golden and a last line with the counts."""
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        line = Text.assemble((f"{row.status:<10}", _STYLES[row.status]), f"{clean(row.name):<{width}}")
        line.append(f"  {clean(row.detail)}" if row.detail else "")
        line.rstrip()
        print_lines(console, line)
    counts = Counter(row.status for row in rows)
    statuses = ", ".join(f"{number} {status}" for status, number in counts.items())
    print_lines(console, Text(f"{format_count(len(rows), 'golden')}{': ' if statuses else ''}{statuses}"))

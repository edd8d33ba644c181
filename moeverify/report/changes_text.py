"""Console output of the changes between two runs."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from moeverify.report.changes import Change, Kind, same_verdicts
from moeverify.report.console import print_lines
from moeverify.report.numbers import format_count, format_seconds
from moeverify.report.sanitize import clean
from moeverify.results.run import RunResult

_TITLES: dict[Kind, str] = {
    "verdict": "verdicts",
    "case": "cases that only one run has",
    "check": "checks",
    "coverage": "tensors compared",
    "bound": "bounds",
    "error": "worst error / bound",
    "recipe": "recipes and layouts",
    "seconds": "times",
    "environment": "environment",
}


def render_changes(changes: list[Change], before: RunResult, after: RunResult, console: Console) -> None:
    """Print the changes by kind, most important first, and whether the verdicts are the same."""
    for kind, title in _TITLES.items():
        members = [change for change in changes if change.kind == kind]
        if not members:
            continue
        print_lines(console, Text(title, style="bold"))
        width = min(max(len(change.subject) for change in members), 40)
        for change in members:
            values = f"{change.before or 'empty'} -> {change.after or 'empty'}"
            print_lines(console, Text(clean(f"  {change.subject:<{width}}  {values}")))
        console.print()
    same = same_verdicts(changes)
    head = ("same verdicts", "green") if same else ("verdicts differ", "bold red")
    sizes = f"{len(before.cases)} -> {format_count(len(after.cases), 'case')}"
    times = f"{format_seconds(before.seconds)} -> {format_seconds(after.seconds)}"
    print_lines(console, Text.assemble(head, f"; {format_count(len(changes), 'change')}; {sizes}; {times}"))

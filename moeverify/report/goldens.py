"""Console output of the status of each golden."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from moeverify.report.console import print_lines
from moeverify.report.numbers import format_count, format_seconds, format_size
from moeverify.report.sanitize import clean
from moeverify.report.words.note import describe_row
from moeverify.results.golden import GoldenPlan, GoldenRow

_STYLES = {
    "recorded": "green",
    "refreshed": "yellow",
    "unchanged": "",
    "missing": "bold red",
    "differs": "bold red",
    "unused": "yellow",
}


def render_plans(plans: Sequence[GoldenPlan], console: Console) -> None:
    """Print the predicted memory and time of each golden."""
    for plan in plans:
        layers, steps = format_count(plan.num_layers, "layer"), format_count(plan.steps, "step")
        lines = (
            f"{clean(plan.recipe)}: {plan.num_parameters:,} parameters in {layers}, "
            f"{steps} of {plan.num_tokens} tokens",
            f"  memory    {format_size(plan.device_bytes)} on {plan.device}",
            f"  disk      {format_size(plan.disk_bytes)} until it is written, then {format_size(plan.record_bytes)}",
            f"  time      {format_seconds(plan.seconds)}: {plan.operations:.2g} operations in {plan.reference}, of "
            f"which {plan.device} makes {plan.rate:.2g} a second",
        )
        for line in lines:
            print_lines(console, Text(line))


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

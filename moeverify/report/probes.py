"""The probes of `moeverify doctor`, on the console."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeverify.report.console import choose_box, print_lines, print_table
from moeverify.report.sanitize import clean
from moeverify.results.probe import ProbeRow

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def render_probes(probes: Sequence[ProbeRow], console: Console) -> None:
    """Print a line for each probe, in a terminal as a table, in a log with one line each, and a last line."""
    table = Table(
        box=choose_box(console), pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1, 0, 0)
    )
    table.add_column("probe", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=2)
    table.add_column("meaning", overflow="fold", ratio=3)
    for probe in probes:
        status = Text(probe.status, style=_STYLES[probe.status])
        table.add_row(Text(clean(probe.name)), status, Text(clean(probe.value)), Text(clean(probe.meaning)))
    print_table(table, console)
    console.print()
    failed = sum(probe.status == "fail" for probe in probes)
    warned = sum(probe.status == "warn" for probe in probes)
    good = len(probes) - failed - warned
    counts = [(f"{good} ok", "ok"), (f"{warned} warn", "warn"), (f"{failed} fail", "fail")]
    line = Text(", ").join(Text(text, style=_STYLES[status]) for text, status in counts)
    print_lines(console, line)

"""Console output of `moeverify doctor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from moeverify.report.console import new_table, print_lines, print_table
from moeverify.report.sanitize import clean
from moeverify.results.probe import ProbeRow, Status

_STYLES: Mapping[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def describe_row(row: ProbeRow) -> Text:
    """Return a line with the status of a probe and the value that it found."""
    return Text.assemble((f"{row.status:<4}", _STYLES[row.status]), f" {clean(row.name)}: {clean(row.value)}")


def _join(probe: ProbeRow) -> str:
    return clean("; ".join(filter(None, (probe.meaning, probe.remedy))))


def render_probes(probes: Sequence[ProbeRow], console: Console, *, missing: Sequence[str] = ()) -> None:
    """Print a table of the probes and a last line with the counts.

    `missing` names probes without a result because of an interrupt; the last line lists them.
    """
    table = new_table(console)
    table.add_column("probe", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=2)
    table.add_column("meaning", overflow="fold", ratio=3)
    for probe in probes:
        status = Text(probe.status, style=_STYLES[probe.status])
        table.add_row(Text(clean(probe.name)), status, Text(clean(probe.value)), Text(_join(probe)))
    print_table(table, console)
    console.print()
    failed = sum(probe.status == "fail" for probe in probes)
    warned = sum(probe.status == "warn" for probe in probes)
    good = len(probes) - failed - warned
    counts: list[tuple[str, Status]] = [
        (f"{good} ok", "ok"),
        (f"{warned} warn", "warn"),
        (f"{failed} fail", "fail"),
    ]
    line = Text(", ").join(Text(text, style=_STYLES[status]) for text, status in counts)
    if missing:
        line.append(f", {len(missing)} not probed: {clean(', '.join(missing))}")
    print_lines(console, line)

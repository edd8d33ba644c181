"""The table of a run: a line for each case."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeverify.report.console import choose_box, style_verdict
from moeverify.report.finding_rows import name_tensor
from moeverify.report.numbers import format_bound, format_number
from moeverify.report.sanitize import clean, elide
from moeverify.report.sorting import count_tensors, find_worst_check
from moeverify.results.run import CaseResult

# Below this a tensor's name says nothing any more, and the findings hold it in full.
_MIN_TENSOR_WIDTH = 16
_GAP = 2
_HEADERS = ("case", "ranks", "compared", "worst / bound", "s", "verdict")


def make_table(cases: Sequence[CaseResult], console: Console) -> Table:
    """Return a line a case: ranks, tensors compared in so many checks, worst error, tensor, time, verdict.

    The tensor's name takes the width that is left, and goes when there is too little.
    """
    rows = [_make_row(case) for case in cases]
    widths = [max(len(cell) for cell in column) for column in zip(_HEADERS, *rows, strict=True)]
    room = console.width - sum(widths) - _GAP * len(widths)
    table = Table(
        box=choose_box(console), pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1, 0, 0)
    )
    table.add_column("case", overflow="fold")
    for header in ("ranks", "compared", "worst / bound"):
        table.add_column(header, justify="right", no_wrap=True)
    if room >= _MIN_TENSOR_WIDTH:
        table.add_column("worst tensor", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for case, row in zip(cases, rows, strict=True):
        cells: list[str | Text] = list(row)
        cells[-1] = style_verdict(case.verdict)
        if room >= _MIN_TENSOR_WIDTH:
            cells.insert(4, elide(_name_worst(case), room))
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table; in a log without the spaces at the ends of its lines."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)


def _make_row(case: CaseResult) -> tuple[str, ...]:
    """Return the cells of one case as plain text, in the order of the headers."""
    compared = f"{count_tensors(case)} in {len(case.checks)}" if case.checks else "-"
    worst = find_worst_check(case)
    numbers = "-"
    if worst is not None and worst.worst is not None:
        numbers = f"{format_number(worst.worst.error)} / {format_bound(worst.worst.bound)}"
    ran = case.verdict != "skipped"
    seconds = f"{case.seconds:.1f}" if ran else "-"
    return clean(case.name), str(case.ranks), compared, numbers, seconds, style_verdict(case.verdict).plain


def _name_worst(case: CaseResult) -> str:
    """Return check and tensor of the worst error, the reason of a case without one."""
    worst = find_worst_check(case)
    if worst is None or worst.worst is None:
        return clean(case.reason).split("\n", 1)[0]
    return name_tensor(worst.name, clean(worst.worst.tensor))

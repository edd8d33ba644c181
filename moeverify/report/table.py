"""Table of a run: one row per case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeverify.report.console import choose_box, style_verdict
from moeverify.report.finding_rows import name_tensor
from moeverify.report.numbers import format_bound, format_number
from moeverify.report.sanitize import clean, elide
from moeverify.report.sorting import count_tensors, find_worst_check
from moeverify.results.run import CaseResult

# Shorter tensor names would be unreadable; the findings show them in full.
_MIN_TENSOR_WIDTH = 16
# Longer case names may be folded. Shorter ones stay on one line, and other columns are dropped if
# necessary.
_MIN_CASE_WIDTH = 24
_GAP = 2
_HEADERS = ("case", "ranks", "compared", "worst / bound", "s", "verdict")
_LEFT_OUT_FIRST = ("s", "compared", "ranks", "worst / bound")


def make_table(cases: Sequence[CaseResult], console: Console) -> Table:
    """Return the table of a run, one row per case.

    Columns: ranks, tensors compared and number of checks, worst error, its tensor, time, verdict. The
    tensor's name takes the remaining width. In a narrow terminal it is dropped first, then the numbers; the
    case and its verdict are always shown.
    """
    rows = [dict(zip(_HEADERS, _make_row(case), strict=True)) for case in cases]
    widths = {header: max(len(header), *(len(row[header]) for row in rows)) for header in _HEADERS}
    headers = _choose_columns(widths, console.width)
    room = console.width - sum(widths[header] + _GAP for header in headers)
    table = Table(
        box=choose_box(console), pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1, 0, 0)
    )
    has_tensor = room >= _MIN_TENSOR_WIDTH and len(headers) == len(_HEADERS)
    for header in headers:
        if header == "s" and has_tensor:
            table.add_column("worst tensor", no_wrap=True)
        is_text = header in ("case", "verdict")
        table.add_column(
            header,
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=header != "case",
            min_width=min(widths[header], _MIN_CASE_WIDTH, (console.width - 1) // 2)
            if header == "case"
            else None,
        )
    for case, row in zip(cases, rows, strict=True):
        cells = [Text(row[header]) for header in headers]
        cells[-1] = style_verdict(case.verdict)
        if has_tensor:
            cells.insert(headers.index("s"), Text(elide(_name_worst(case), room)))
        table.add_row(*cells)
    return table


def _choose_columns(widths: Mapping[str, int], width: int) -> list[str]:
    """Return the columns that leave enough room for the case name."""
    headers = list(_HEADERS)
    for header in _LEFT_OUT_FIRST:
        others = sum(widths[other] + _GAP for other in headers if other != "case")
        if width - others - _GAP >= min(widths["case"], _MIN_CASE_WIDTH):
            break
        headers.remove(header)
    return headers


def _make_row(case: CaseResult) -> tuple[str, ...]:
    """Return the cells of one case as plain text, in header order."""
    compared = f"{count_tensors(case)} in {len(case.checks)}" if case.checks else "-"
    worst = find_worst_check(case)
    numbers = "-"
    if worst is not None and worst.worst is not None:
        numbers = f"{format_number(worst.worst.error)} / {format_bound(worst.worst.bound)}"
    ran = case.verdict != "skipped"
    seconds = f"{case.seconds:.1f}" if ran else "-"
    return clean(case.name), str(case.ranks), compared, numbers, seconds, style_verdict(case.verdict).plain


def _name_worst(case: CaseResult) -> str:
    """Return check and tensor of the worst error, or the reason of a case that has none."""
    worst = find_worst_check(case)
    if worst is None or worst.worst is None:
        return clean(case.reason).split("\n", 1)[0]
    return name_tensor(worst.name, clean(worst.worst.tensor))

"""Overview of the fault benchmark: one row per class of bugs, one cell per fault, coloured by outcome."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from moeverify.report.numbers import format_count
from moeverify.report.pictures.picture import Picture, clear_frame, make_figure
from moeverify.report.pictures.theme import COLORS
from moeverify.report.sanitize import clean
from moeverify.results.benchmark_rows import FaultRow

TITLE = "Faults by class"
_CELL = (0.5, 0.34)  # inches
_MOST_MISSED = 12
# Best outcome first: legend label, colour, and whether text on it has the background colour.
_LEVELS = (
    ("cause named", "heat-0", False),
    ("located, no cause", "heat-2", False),
    ("detected, not located", "heat-3", False),
    ("not detected", "heat-5", True),
    ("skipped here", "soft", False),
)


def draw(rows: Sequence[FaultRow]) -> Picture | None:
    """Return the picture of the faults by class; None if there are none."""
    if not rows:
        return None
    classes: dict[str, list[FaultRow]] = {}
    for row in rows:
        classes.setdefault(row.number[:1], []).append(row)
    widest = max(map(len, classes.values()))
    figure = make_figure(max(5.6, 0.9 + _CELL[0] * widest), 0.9 + _CELL[1] * len(classes))
    axes = figure.add_subplot()
    clear_frame(axes)
    axes.set_xlim(0, widest)
    axes.set_ylim(len(classes), 0)
    for line, members in enumerate(classes.values()):
        for column, row in enumerate(members):
            _draw_cell(axes, row, line, column)
    axes.set_yticks([at + 0.5 for at in range(len(classes))], list(classes))
    axes.tick_params(length=0)
    seen = {find_level(row) for row in rows}
    handles = [
        Patch(facecolor=COLORS[color], edgecolor=COLORS["line"], label=label)
        for level, (label, color, _) in enumerate(_LEVELS)
        if level in seen
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3)
    return Picture(TITLE, _describe(rows), figure)


def find_level(row: FaultRow) -> int:
    """Return the legend position of a fault's outcome."""
    if row.verdict == "skipped":
        return 4
    if not row.detected:
        return 3
    if not row.located:
        return 2
    return 0 if row.cause_named else 1


def _draw_cell(axes: Axes, row: FaultRow, line: int, column: int) -> None:
    _, color, is_dark = _LEVELS[find_level(row)]
    axes.add_patch(
        Rectangle((column, line), 1, 1, facecolor=COLORS[color], edgecolor=COLORS["back"], linewidth=1.5)
    )
    ink = COLORS["back" if is_dark else "text"]
    axes.text(column + 0.5, line + 0.5, clean(row.number), ha="center", va="center", color=ink, fontsize=7)


def _describe(rows: Sequence[FaultRow]) -> str:
    ran = [row for row in rows if row.verdict != "skipped"]
    detected, located, named = (
        sum(map(bool, marks))
        for marks in (
            [row.detected for row in ran],
            [row.located for row in ran],
            [row.cause_named for row in ran],
        )
    )
    parts = [
        f"Of {format_count(len(ran), 'fault')} {detected} are detected, {located} located and {named} named."
    ]
    missed = [row.number for row in ran if not row.detected]
    if missed:
        more = ", ..." if len(missed) > _MOST_MISSED else ""
        parts.append(f"Not detected: {', '.join(map(clean, missed[:_MOST_MISSED]))}{more}.")
    if len(ran) < len(rows):
        parts.append(f"{format_count(len(rows) - len(ran), 'fault')} skipped.")
    return " ".join(parts)

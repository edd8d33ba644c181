"""The pairs of `moeverify reshard`: a row per layout that saved, a column per layout that loaded."""

from __future__ import annotations

from collections import Counter

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from moeverify.report.matrix import Matrix, describe_cell
from moeverify.report.numbers import format_count
from moeverify.report.pictures.picture import Picture, clear_frame, make_figure
from moeverify.report.pictures.theme import COLORS
from moeverify.report.sanitize import clean, elide

_MOST_NAMES = 40
_CELL = (0.86, 0.34)  # inches
_LABEL = 26  # characters
_NO_PAIR = "soft"
_FACES = {"pass": "heat-0", "mismatch": "heat-4", "error": "heat-6", "skipped": "soft"}
_MEANINGS = {
    "pass": "bitwise equal, and trains on",
    "mismatch": "differs",
    "error": "failed",
    "skipped": "skipped",
}
_DARK = ("mismatch", "error")


def draw(matrix: Matrix) -> Picture:
    """Return the matrix of one recipe, limited to its first rows and columns."""
    names = matrix.names[:_MOST_NAMES]
    labels = [elide(clean(name.removesuffix(f" {matrix.recipe}")), _LABEL) for name in names]
    figure = make_figure(2.6 + _CELL[0] * len(names), 2.2 + _CELL[1] * len(names))
    axes = figure.add_subplot()
    clear_frame(axes)
    axes.set_xlim(0, len(names))
    axes.set_ylim(len(names), 0)
    seen: set[str] = set()
    for row, saver in enumerate(names):
        for column, loader in enumerate(names):
            seen.add(_draw_cell(axes, matrix, saver, loader, row, column))
    axes.xaxis.tick_top()
    axes.set_xticks(
        [at + 0.5 for at in range(len(names))], labels, rotation=40, ha="left", rotation_mode="anchor"
    )
    axes.set_yticks([at + 0.5 for at in range(len(names))], labels)
    axes.tick_params(length=0)
    axes.set_ylabel("saved by")
    axes.set_xlabel("loaded by")
    handles = [
        Patch(facecolor=COLORS[_FACES[verdict]], edgecolor=COLORS["line"], label=meaning)
        for verdict, meaning in _MEANINGS.items()
        if verdict in seen
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=4)
    return Picture(f"Checkpoints of {clean(matrix.recipe)}", _describe(matrix, len(names)), figure)


def _draw_cell(axes: Axes, matrix: Matrix, saver: str, loader: str, row: int, column: int) -> str:
    """Draw a pair and return its verdict; empty if there is no such pair."""
    case = matrix.cells.get((saver, loader))
    verdict = case.verdict if case is not None else ""
    face = COLORS[_FACES.get(verdict, _NO_PAIR)]
    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=face, edgecolor=COLORS["back"], linewidth=1.5))
    ink = COLORS["back" if verdict in _DARK else "text"]
    text = elide(describe_cell(case).lower(), 14)
    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=7)
    return verdict


def _describe(matrix: Matrix, num_shown: int) -> str:
    counts = Counter(case.verdict for case in matrix.cells.values())
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    parts = [f"{format_count(len(matrix.cells), 'pair')} of layouts: {words}."]
    failed = [
        f"saved by {clean(saver)}, loaded by {clean(loader)}: {describe_cell(case).lower()}"
        for (saver, loader), case in matrix.cells.items()
        if case.has_failed
    ]
    if failed:
        more = f"; and {len(failed) - 5} more" if len(failed) > 5 else ""
        parts.append("; ".join(failed[:5]) + more + ".")
    if num_shown < len(matrix.names):
        parts.append(f"The first {num_shown} of {len(matrix.names)} layouts are drawn.")
    return " ".join(parts)

"""Heat map of error / bound of all tensors, by family, layer, check and step; marks the first finding."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path

from moeverify.report.finding_rows import name_finding
from moeverify.report.numbers import format_count
from moeverify.report.pictures.picture import Picture, clear_frame, make_figure
from moeverify.report.pictures.theme import COLORS
from moeverify.report.sanitize import clean, elide
from moeverify.report.sorting import order_findings
from moeverify.results.error_map import ErrorMap
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult

TITLE = "Error over bound"
_LEVELS = (
    (1.0, "within the bound"),
    (10.0, "to 10 times"),
    (1e3, "to 1000 times"),
    (1e6, "to 1e6 times"),
    (1e9, "to 1e9 times"),
    (math.inf, "more"),
)
_INFINITE = "not finite, or bitwise equality broken"
_MOST_COLUMNS = 120
_MOST_LAYERS = 16
_MOST_ROWS = 48
_MOST_NUMBERS = 300
_OUTSIDE = ""  # the layer name of tensors outside of layers
_CELL = 0.19  # inches
_DARK_LEVELS = (4, 5, 6)  # on these, text has the background colour
_LAYER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


@dataclass(frozen=True)
class _Column:
    step: int
    check: str
    layer: str


_Cells = Mapping[tuple[_Column, str], float]


def draw(case: CaseResult) -> Picture | None:
    """Return the heat map; None if nothing differs, or if an old result has no errors of tensors."""
    shown = _choose_checks(case)
    if not shown:
        return None
    layers = _bin_layers(shown)
    steps = _choose_steps(shown, case, layers)
    cells = _fill(shown, steps, layers)
    if not cells:
        return None
    columns = _list_columns(shown, steps, layers, cells)
    rows, num_left_out = _list_rows(cells)
    figure = make_figure(2.6 + _CELL * len(columns), 1.7 + _CELL * len(rows))
    axes = figure.add_subplot()
    clear_frame(axes)
    axes.set_xlim(-0.2, len(columns) + 0.2)
    axes.set_ylim(len(rows) + 0.2, -0.2)
    axes.set_aspect("equal")
    _draw_cells(axes, cells, columns, rows)
    _label_rows(axes, rows)
    _label_columns(axes, columns, len(rows))
    first = next(iter(order_findings(case.findings)), None)
    place = _mark_first(axes, first, cells, columns, rows, layers)
    handles = [Patch(color=COLORS[f"heat-{level}"], label=label) for level, label in _list_labels(cells)]
    figure.legend(handles=handles, loc="outside lower left", ncols=4)
    return Picture(TITLE, _describe(cells, first, place, steps, shown, num_left_out), figure)


def _choose_checks(case: CaseResult) -> list[ErrorMap]:
    """Return the checks to show: checks of parameters, and other checks with findings."""
    differing = {finding.check for finding in case.findings}
    parameters = {"gradient", "update", "optimizer state"}
    shown = [each for each in case.errors if each.check in differing | parameters]
    return shown if any(each.check in differing for each in shown) else []


def split_name(tensor: str) -> tuple[str, str]:
    """Return the layer (first number in the name, or empty) and the name without it."""
    match = _LAYER.search(tensor)
    if match is None:
        return _OUTSIDE, tensor
    rest = tensor[match.end() :].lstrip(".")
    return match[0], rest or tensor[: match.start()].rstrip(".")


def _bin_layers(shown: Sequence[ErrorMap]) -> dict[str, str]:
    """Return the column label of each layer: its number, or a range of layers in a deep model."""
    numbers = {split_name(tensor)[0] for each in shown for tensor in each.tensors} - {_OUTSIDE}
    ordered = sorted(numbers, key=int)
    size = math.ceil(len(ordered) / _MOST_LAYERS)
    bins = {_OUTSIDE: _OUTSIDE}
    for start in range(0, len(ordered), max(size, 1)):
        part = ordered[start : start + size]
        name = part[0] if len(part) == 1 else f"{part[0]}-{part[-1]}"
        bins |= dict.fromkeys(part, name)
    return bins


def _choose_steps(shown: Sequence[ErrorMap], case: CaseResult, layers: Mapping[str, str]) -> list[int]:
    """Return the steps that fit, starting at the first one with a finding."""
    first = min(finding.step for finding in case.findings)
    steps = sorted({step for each in shown for step in each.steps if step >= first})
    per_step = max(1, sum(len(_list_layers(each, layers)) for each in shown))
    return steps[: max(1, _MOST_COLUMNS // per_step)]


def _list_layers(each: ErrorMap, layers: Mapping[str, str]) -> list[str]:
    """Return the columns of a check: the layers in order, then tensors outside of layers."""
    found = {layers[split_name(tensor)[0]] for tensor in each.tensors}
    inner = [name for name in dict.fromkeys(layers.values()) if name in found and name != _OUTSIDE]
    return inner + [_OUTSIDE] * (_OUTSIDE in found)


def _fill(shown: Sequence[ErrorMap], steps: Sequence[int], layers: Mapping[str, str]) -> _Cells:
    """Return the largest error / bound in each cell."""
    cells: dict[tuple[_Column, str], float] = {}
    for each in shown:
        for tensor, row in zip(each.tensors, each.shares, strict=True):
            layer, family = split_name(tensor)
            for step, share in zip(each.steps, row, strict=True):
                if share is not None and step in steps:
                    key = (_Column(step, each.check, layers[layer]), family)
                    cells[key] = max(share, cells.get(key, 0.0))
    return cells


def _list_columns(
    shown: Sequence[ErrorMap], steps: Sequence[int], layers: Mapping[str, str], cells: _Cells
) -> list[_Column]:
    filled = {column for column, _ in cells}
    every = (
        _Column(step, each.check, layer)
        for step in steps
        for each in shown
        for layer in _list_layers(each, layers)
    )
    return [column for column in every if column in filled]


def _list_rows(cells: _Cells) -> tuple[list[str], int]:
    """Return the worst families in model order, limited in number, and how many were left out."""
    worst: dict[str, float] = {}
    for (_, family), share in cells.items():
        worst[family] = max(share, worst.get(family, 0.0))
    kept = sorted(worst, key=lambda family: -worst[family])[:_MOST_ROWS]
    return [family for family in worst if family in kept], len(worst) - len(kept)


def find_level(share: float) -> int:
    """Return the colour level for a value of error / bound."""
    if not math.isfinite(share):
        return len(_LEVELS)
    return next(number for number, (most, _) in enumerate(_LEVELS) if share <= most)


def _list_labels(cells: _Cells) -> Iterator[tuple[int, str]]:
    present = {find_level(share) for share in cells.values()}
    for level, label in enumerate([*(label for _, label in _LEVELS), _INFINITE]):
        if level in present:
            yield level, label


def _draw_cells(axes: Axes, cells: _Cells, columns: Sequence[_Column], rows: Sequence[str]) -> None:
    """Draw one path per colour, which keeps the SVG small, and powers of ten if there are few."""
    at_column, at_row = ({item: at for at, item in enumerate(items)} for items in (columns, rows))
    boxes: dict[int, list[Path]] = {}
    num_over = sum(share > 1.0 for share in cells.values())
    for (column, family), share in cells.items():
        if family not in at_row:
            continue
        x, y, level = at_column[column], at_row[family], find_level(share)
        corners = [(x + 0.05, y + 0.05), (x + 0.95, y + 0.05), (x + 0.95, y + 0.95), (x + 0.05, y + 0.95)]
        boxes.setdefault(level, []).append(Path([*corners, corners[0]], closed=True))
        if 10.0 <= share < math.inf and num_over <= _MOST_NUMBERS:
            color = COLORS["back" if level in _DARK_LEVELS else "text"]
            power = str(math.floor(math.log10(share)))
            axes.text(x + 0.5, y + 0.53, power, ha="center", va="center", fontsize=6, color=color)
    for level, paths in sorted(boxes.items()):
        path = Path.make_compound_path(*paths)
        axes.add_patch(PathPatch(path, facecolor=COLORS[f"heat-{level}"], edgecolor="none"))


def _label_rows(axes: Axes, rows: Sequence[str]) -> None:
    names = [elide(clean(family), 34) for family in rows]
    axes.set_yticks([position + 0.5 for position in range(len(rows))], names)
    axes.tick_params(length=0)


def _label_columns(axes: Axes, columns: Sequence[_Column], num_rows: int) -> None:
    """Label the layers below, the checks above at an angle, and the steps above the checks."""
    names = [column.layer or "-" for column in columns]
    turned = 90 if any(len(name) > 2 for name in names) else 0
    axes.set_xticks([at + 0.5 for at in range(len(columns))], names, rotation=turned, fontsize=7)
    axes.set_xlabel("layer")
    before: _Column | None = None
    for at, column in enumerate(columns):
        if before is None or (before.step, before.check) != (column.step, column.check):
            axes.text(at + 0.4, -0.35, clean(column.check), rotation=40, fontsize=7, color=COLORS["dim"])
        if before is None or before.step != column.step:
            title = f"step {column.step}" if column.step >= 0 else "before step 0"
            axes.text(at, -4.6, title, fontsize=9, fontweight="bold")
            if before is not None:
                axes.plot([at, at], [-4.6, num_rows], color=COLORS["dim"], linewidth=0.8, clip_on=False)
        before = column


def _mark_first(
    axes: Axes,
    first: Finding | None,
    cells: _Cells,
    columns: Sequence[_Column],
    rows: Sequence[str],
    layers: Mapping[str, str],
) -> bool:
    """Draw a frame around the cell of the first finding; return whether it is in the picture."""
    if first is None:
        return False
    for tensor in (first.tensor, first.tensor.rpartition(".")[0]):  # moments are drawn with their parameter
        layer, family = split_name(tensor)
        column = _Column(first.step, first.check, layers.get(layer, layer))
        if (column, family) in cells and family in rows:
            x, y = columns.index(column), rows.index(family)
            frame = Rectangle(
                (x, y), 1, 1, fill=False, edgecolor=COLORS["text"], linewidth=1.8, clip_on=False
            )
            axes.add_patch(frame)
            return True
    return False


def _describe(
    cells: _Cells,
    first: Finding | None,
    is_marked: bool,
    steps: Sequence[int],
    shown: Sequence[ErrorMap],
    num_left_out: int,
) -> str:
    num_over = sum(share > 1.0 for share in cells.values())
    parts = [
        f"{num_over} of {len(cells)} cells are over their bound. Below '-' are tensors outside of layers."
    ]
    if num_over <= _MOST_NUMBERS:
        parts.append("A number is the power of ten of error over bound.")
    if first is not None and is_marked:
        parts.append(f"The frame marks the first finding: {clean(name_finding(first))}.")
    num_steps = len({step for each in shown for step in each.steps if step >= steps[0]})
    if num_steps > len(steps):
        parts.append(f"{format_count(num_steps - len(steps), 'later step')} not shown.")
    if num_left_out:
        parts.append(f"{format_count(num_left_out, 'row')} with smaller errors not shown.")
    return " ".join(parts)

"""The device mesh: ranks coloured by their number of wrong tensors, with the groups of suspected axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from moeverify.report.numbers import format_range
from moeverify.report.pictures.picture import Picture, clear_frame, make_figure
from moeverify.report.pictures.theme import COLORS
from moeverify.report.sorting import order_findings
from moeverify.results.finding import Finding
from moeverify.results.mesh import MeshShape
from moeverify.results.run import CaseResult

TITLE = "Device mesh"
_MOST_RANKS = 64
_MOST_PANELS = 3
_NUM_COLORS = 8
_BOX = (1.15, 0.62)  # inches


def draw(case: CaseResult) -> Picture | None:
    """Return one panel per suspected axis; None for one device or a mesh too large to read."""
    if case.mesh is None or not 1 < case.ranks <= _MOST_RANKS or not (case.findings or case.rank_reports):
        return None
    first = next(iter(order_findings(case.findings)), None)
    counts, num_tensors = _count_by_rank(case, first)
    guilty = [axis for axis in _list_guilty(first) if axis in case.mesh.groups][:_MOST_PANELS]
    width = _find_width(case.mesh, case.ranks)
    height = math.ceil(case.ranks / width)
    panels = max(1, len(guilty))
    side_by_side = panels if width * panels <= 8 else 1
    stacked = math.ceil(panels / side_by_side)
    figure = make_figure(
        max(4.0, side_by_side * width * _BOX[0] + 0.6), stacked * (height * _BOX[1] * 1.3 + 0.5)
    )
    for number in range(panels):
        axes = figure.add_subplot(stacked, side_by_side, number + 1)
        clear_frame(axes)
        axes.set_xlim(-0.1, width + 0.1)
        axes.set_ylim(height + 0.05, -0.3)
        _draw_ranks(axes, case, counts, num_tensors, width, first)
        if guilty:
            axes.set_title(f"groups of {guilty[number]}", color=COLORS["guilty"])
            _draw_groups(axes, case.mesh.groups[guilty[number]], width)
    return Picture(TITLE, _describe(case, case.mesh, first, guilty, num_tensors), figure)


def _list_guilty(first: Finding | None) -> Sequence[str]:
    return first.place.axes if first is not None and first.place is not None else ()


def _count_by_rank(case: CaseResult, first: Finding | None) -> tuple[list[int], int]:
    """Return how many tensors of the first finding's check and step differ per rank, and in total."""
    if first is None:
        return [0] * case.ranks, 0
    alike = [each for each in case.findings if (each.check, each.step) == (first.check, first.step)]
    counts = [sum(rank in each.ranks or rank == each.rank for each in alike) for rank in range(case.ranks)]
    return counts, len(alike)


def _find_width(mesh: MeshShape, num_ranks: int) -> int:
    """Return the number of ranks in a row: the product of the innermost axes that fit."""
    width = 1
    for size in reversed(list(mesh.axes.values())):
        if width * size > 8:
            break
        width *= size
    return width if width > 1 else min(num_ranks, 8)


def _locate(rank: int, width: int) -> tuple[float, float]:
    return rank % width + 0.5, rank // width + 0.5


def _draw_ranks(
    axes: Axes, case: CaseResult, counts: Sequence[int], num_tensors: int, width: int, first: Finding | None
) -> None:
    states = {report.rank: report.state for report in case.rank_reports}
    assert case.mesh is not None
    for rank in range(case.ranks):
        x, y = _locate(rank, width)
        level = 0 if not counts[rank] else 1 + round(4 * counts[rank] / num_tensors)
        color = COLORS[f"heat-{level}"] if num_tensors else COLORS["soft"]
        is_worst = first is not None and first.rank == rank and num_tensors > 0
        box = FancyBboxPatch(
            (x - 0.38, y - 0.27),
            0.76,
            0.54,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=color,
            edgecolor=COLORS["text" if is_worst else "line"],
            linewidth=1.8 if is_worst else 0.8,
        )
        axes.add_patch(box)
        ink = COLORS["back" if level >= 4 else "text"]
        note = states.get(rank, f"{counts[rank]} of {num_tensors}" if num_tensors else "")
        axes.text(x, y - 0.11, f"rank {rank}", ha="center", va="center", color=ink, fontweight="bold")
        axes.text(x, y + 0.07, note, ha="center", va="center", color=ink, fontsize=7)


def _draw_groups(axes: Axes, groups: Sequence[Sequence[int]], width: int) -> None:
    """Colour the box of each rank by its group, and connect groups that lie in one row or column."""
    for number, group in enumerate(groups):
        color = COLORS[f"part-{number % _NUM_COLORS}"]
        places = [_locate(rank, width) for rank in group]
        for x, y in places:
            axes.add_patch(Rectangle((x - 0.36, y + 0.17), 0.72, 0.055, facecolor=color, edgecolor="none"))
        (x_first, y_first), shift = places[0], 0.05 * (number % _NUM_COLORS)
        if all(y == y_first for _, y in places):  # a bracket above the boxes
            line = y_first - 0.33 - shift / 1.2
            for x, y in places:
                axes.plot([x, x], [y - 0.27, line], color=color, linewidth=1.8, clip_on=False)
            axes.plot([x_first, places[-1][0]], [line, line], color=color, linewidth=1.8, clip_on=False)
        elif all(x == x_first for x, _ in places):  # a bracket to the left of the boxes
            line = x_first - 0.43 - 0.05 * (number % 2)
            for x, y in places:
                axes.plot([x - 0.38, line], [y, y], color=color, linewidth=1.8, clip_on=False)
            axes.plot([line, line], [y_first, places[-1][1]], color=color, linewidth=1.8, clip_on=False)


def _describe(
    case: CaseResult, mesh: MeshShape, first: Finding | None, guilty: Sequence[str], num_tensors: int
) -> str:
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.axes.items())
    parts = [f"{case.ranks} ranks: {sizes}." if sizes else f"{case.ranks} ranks."]
    if first is not None and num_tensors:
        step = f"step {first.step}" if first.step >= 0 else "the start"
        parts.append(
            f"A rank has the number of tensors that differ on it, of {num_tensors} that differ in the check "
            f"{first.check} at {step}; rank {first.rank} has the largest error."
        )
    for axis in guilty:
        members = " | ".join(format_range(group) for group in mesh.groups[axis])
        parts.append(f"The groups of {axis}, in one colour each, are {members}.")
    return " ".join(parts)

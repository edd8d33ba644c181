"""The collectives of the step with the first difference: one row per rank, one bar per collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from moeverify.report.numbers import format_count
from moeverify.report.pictures.picture import Picture, clear_frame, make_figure
from moeverify.report.pictures.theme import COLORS
from moeverify.report.sanitize import clean
from moeverify.report.sorting import order_findings
from moeverify.results.run import CaseResult
from moeverify.results.timeline import TimedCollective, Timeline

TITLE = "Collectives by rank"
_MOST_RANKS = 16
_MOST_OPS = 6
_NUM_COLORS = 8
_THINNEST = 0.0035  # smallest bar, as a share of the width: shorter ones would be invisible
_ROW = 0.34  # inches


def draw(case: CaseResult) -> Picture | None:
    """Return the timeline; None if no rank issued a collective, or the result kept none."""
    timeline = case.timeline
    if timeline is None or not any(timeline.ranks):
        return None
    suspects = _find_suspects(case, timeline)
    shown = range(min(len(timeline.ranks), _MOST_RANKS))
    axis_names = _order_axes(timeline)
    colors = {axis: COLORS[f"part-{at % _NUM_COLORS}"] for at, axis in enumerate(axis_names)}
    end = max(_find_end(each) for row in timeline.ranks for each in row)
    figure = make_figure(8.8, 1.25 + _ROW * len(shown))
    axes = figure.add_subplot()
    clear_frame(axes)
    for rank in shown:
        _draw_rank(axes, timeline, rank, end, colors, suspects)
    axes.set_xlim(-0.01 * end, 1.01 * end)
    axes.set_ylim(len(shown) - 0.35, -0.65)
    axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in shown])
    ticks = [end * part / 4 for part in range(5)]
    axes.set_xticks(ticks, [f"{1e3 * tick:.3g} ms" for tick in ticks])
    axes.tick_params(length=0)
    handles = [Patch(facecolor=colors[axis], label=_name_axis(axis)) for axis in axis_names[:_NUM_COLORS]]
    if suspects:
        label = "where the first difference is"
        handles.append(Patch(facecolor="none", edgecolor=COLORS["mismatch"], linewidth=1.6, label=label))
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    return Picture(TITLE, _describe(timeline, suspects), figure)


def _find_suspects(case: CaseResult, timeline: Timeline) -> set[int]:
    """Return the kinds of collectives in the first finding's module, or in the nearest enclosing one.

    The search stays inside the layer if the module is in one.
    """
    first = next(iter(order_findings(case.findings)), None)
    if first is None:
        return set()
    place = first.place
    module = place.module if place is not None and place.module else first.tensor.rpartition(".")[0]
    is_in_layer = _is_in_layer(module)
    while module and _is_in_layer(module) == is_in_layer:
        found = {
            position
            for position, kind in enumerate(timeline.kinds)
            if kind.module == module or kind.module.startswith(f"{module}.")
        }
        if found:
            return found
        module = module.rpartition(".")[0]
    return set()


def _is_in_layer(module: str) -> bool:
    return any(part.isdecimal() for part in module.split("."))


def _order_axes(timeline: Timeline) -> list[str]:
    """Return the axes of the collectives, the most used first."""
    used = Counter(timeline.kinds[each.kind].axis for row in timeline.ranks for each in row)
    return [axis for axis, _ in used.most_common()]


def _name_axis(axis: str) -> str:
    return clean(axis) if axis else "other groups"


def _find_end(each: TimedCollective) -> float:
    return each.started + (each.seconds or 0.0)


def _draw_rank(
    axes: Axes,
    timeline: Timeline,
    rank: int,
    end: float,
    colors: Mapping[str, str],
    suspects: set[int],
) -> None:
    axes.plot([0, end], [rank, rank], color=COLORS["line"], linewidth=0.8, zorder=0)
    for each in timeline.ranks[rank]:
        width = max(each.seconds or 0.0, _THINNEST * end)
        is_suspect = each.kind in suspects
        axes.add_patch(
            Rectangle(
                (each.started, rank - 0.3),
                width,
                0.6,
                facecolor=colors[timeline.kinds[each.kind].axis],
                edgecolor=COLORS["mismatch"] if is_suspect else COLORS["back"],
                linewidth=1.6 if is_suspect else 0.3,
                zorder=2 if is_suspect else 1,
            )
        )


def _describe(timeline: Timeline, suspects: set[int]) -> str:
    step = f"step {timeline.step}" if timeline.step >= 0 else "set-up before step 0"
    counts = timeline.num_issued
    if len(set(counts)) == 1:
        parts = [f"Each of {len(counts)} ranks issued {format_count(counts[0], 'collective')} in {step}."]
    else:
        by_rank = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts[:_MOST_RANKS]))
        parts = [f"The ranks issued different numbers of collectives in {step}: {by_rank}."]
    longest = _find_longest(timeline)
    if longest:
        parts.append(longest)
    if suspects:
        parts.append(f"Framed, where the first difference is: {_list_kinds(timeline, suspects)}.")
    kept = [len(row) for row in timeline.ranks]
    if kept != list(counts):
        parts.append(f"The first {max(kept)} of each rank are drawn.")
    if len(timeline.ranks) > _MOST_RANKS:
        parts.append(f"{format_count(len(timeline.ranks) - _MOST_RANKS, 'further rank')} not drawn.")
    parts.append("Times are those of the second run, which looks for causes; each node has its own clock.")
    return " ".join(parts)


def _find_longest(timeline: Timeline) -> str:
    timed = [
        (each.seconds, rank, each)
        for rank, row in enumerate(timeline.ranks)
        for each in row
        if each.seconds is not None
    ]
    if not timed:
        return ""
    seconds, rank, each = max(timed, key=lambda item: item[0])
    kind = timeline.kinds[each.kind]
    where = f" in {clean(kind.module)}" if kind.module else ""
    return (
        f"The longest is {kind.op} of {_name_axis(kind.axis)}{where} on rank {rank}, {1e3 * seconds:.3g} ms."
    )


def _list_kinds(timeline: Timeline, suspects: set[int]) -> str:
    named: Sequence[str] = list(
        dict.fromkeys(
            f"{kind.op} of {_name_axis(kind.axis)} in {clean(kind.module)}"
            + (f" ({kind.direction})" if kind.direction else "")
            for kind in (timeline.kinds[position] for position in sorted(suspects))
        )
    )
    more = f", and {len(named) - _MOST_OPS} more" if len(named) > _MOST_OPS else ""
    return ", ".join(named[:_MOST_OPS]) + more

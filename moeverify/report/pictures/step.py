"""One profiled step: the times at which each rank computed, ran collectives, or was idle."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from moeverify.report.numbers import format_count
from moeverify.report.pictures.picture import Picture, clear_frame, make_figure
from moeverify.report.pictures.theme import COLORS
from moeverify.report.sanitize import clean
from moeverify.results.measurement import Interval, Measurement, RankStep

TITLE = "One step"
_MOST_RANKS = 16
_ROW = 0.62  # inches
_KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send and receive")
_COMPUTING = "part-0"
_THINNEST = 0.0006  # smallest bar, as a share of the width


def draw(case: Measurement) -> Picture | None:
    """Return the picture of a profiled step; None if no profile was kept.

    Each rank has two lanes: computation above, collectives below. This shows which collectives overlap with
    computation. Where both lanes are empty, nothing ran.
    """
    if not case.profile:
        return None
    shown = case.profile[:_MOST_RANKS]
    end = max(step.seconds for step in shown)
    found = {kind for step in shown for kind in step.communicating}
    kinds = [*(kind for kind in _KINDS if kind in found), *sorted(found - set(_KINDS))]
    colors = {kind: COLORS[f"part-{1 + at % 7}"] for at, kind in enumerate(kinds)}
    figure = make_figure(9.6, 1.1 + _ROW * len(shown))
    axes = figure.add_subplot()
    clear_frame(axes)
    for rank, step in enumerate(shown):
        _draw_lane(axes, step.computing, rank - 0.36, COLORS[_COMPUTING], end)
        for kind, intervals in step.communicating.items():
            _draw_lane(axes, intervals, rank + 0.02, colors[kind], end)
        axes.plot([0, step.seconds], [rank, rank], color=COLORS["line"], linewidth=0.6, zorder=0)
    axes.set_xlim(-0.005 * end, 1.005 * end)
    axes.set_ylim(len(shown) - 0.5, -0.55)
    axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in range(len(shown))])
    ticks = [end * part / 4 for part in range(5)]
    axes.set_xticks(ticks, [f"{1e3 * tick:.3g} ms" for tick in ticks])
    axes.tick_params(length=0)
    handles = [Patch(facecolor=COLORS[_COMPUTING], label="computing")]
    handles += [Patch(facecolor=colors[kind], label=clean(kind)) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper left", ncols=7)
    return Picture(f"{TITLE} of {clean(case.name)}", _describe(case.profile), figure)


def _draw_lane(axes: Axes, intervals: Sequence[Interval], top: float, color: str, end: float) -> None:
    """Draw the bars of a lane as one collection, since a step of a large model has thousands."""
    bars = []
    for start, seconds in intervals:
        stop = start + max(seconds, _THINNEST * end)
        bars.append([(start, top), (stop, top), (stop, top + 0.34), (start, top + 0.34)])
    axes.add_collection(PolyCollection(bars, facecolors=color, edgecolors="none"))


def _describe(steps: Sequence[RankStep]) -> str:
    parts = []
    for rank, step in enumerate(steps[:_MOST_RANKS]):
        exposed = step.seconds - step.computed - step.idle
        shares = (step.computed, exposed, step.idle)
        computed, only_collectives, idle = (f"{100 * part / step.seconds:.0f} %" for part in shares)
        parts.append(
            f"Rank {rank}: {1e3 * step.seconds:.3g} ms, computing {computed}, only collectives "
            f"{only_collectives}, neither {idle}."
        )
    if len(steps) > _MOST_RANKS:
        parts.append(f"{format_count(len(steps) - _MOST_RANKS, 'further rank')} not drawn.")
    parts.append("Where a device does neither it waits for its host; the profiler slows the host down.")
    return " ".join(parts)

"""Token copies of each expert, by layer and by sending rank."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from moeverify.report.numbers import format_number
from moeverify.report.pictures.picture import Picture, make_figure
from moeverify.report.pictures.theme import COLORS
from moeverify.results.load import ExpertLoad
from moeverify.results.run import CaseResult

TITLE = "Expert load"
_MOST_LAYERS = 6
_MOST_SOURCES = 8  # the number of available colours


def draw(case: CaseResult) -> Picture | None:
    """Return one bar chart per MoE layer, summed over steps; None if no router was seen."""
    load = case.load
    if load is None or not load.copies or not load.layers:
        return None
    sums = [_sum_steps(load, at) for at in range(len(load.layers))]
    order = sorted(range(len(sums)), key=lambda at: -_measure_imbalance(sums[at]))
    shown = sorted(order[:_MOST_LAYERS])
    figure = make_figure(8.0, 0.7 + 1.5 * len(shown))
    grid = figure.subplots(len(shown), 1, squeeze=False, sharex=True)
    for row, at in enumerate(shown):
        axes = grid[row][0]
        _draw_layer(axes, sums[at])
        axes.set_title(f"layer {load.layers[at]}")
        axes.set_ylabel("token copies")
    last = grid[-1][0]
    last.set_xlabel("expert")
    every = max(1, load.num_experts // 32)
    last.set_xticks(range(0, load.num_experts, every))
    last.set_xlim(-0.6, load.num_experts - 0.4)
    grid[0][0].legend(loc="upper right", ncols=4)
    return Picture(TITLE, _describe(load, sums, len(shown)), figure)


def _sum_steps(load: ExpertLoad, layer: int) -> list[list[int]]:
    """Return the copies summed over all steps. Shape: (experts, sources)."""
    return [
        [sum(step[layer][expert][source] for step in load.copies) for source in range(load.num_sources)]
        for expert in range(load.num_experts)
    ]


def _measure_imbalance(copies: Sequence[Sequence[int]]) -> float:
    """Return the largest load of an expert over the mean load."""
    totals = [sum(row) for row in copies]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 0.0


def _draw_layer(axes: Axes, copies: Sequence[Sequence[int]]) -> None:
    experts = range(len(copies))
    num_sources = len(copies[0])
    if num_sources > _MOST_SOURCES:
        axes.bar(experts, [sum(row) for row in copies], color=COLORS["part-0"], label="all ranks")
    else:
        bottoms = [0] * len(copies)
        for source in range(num_sources):
            heights = [row[source] for row in copies]
            label = f"from ep {source}" if num_sources > 1 else "all tokens"
            axes.bar(experts, heights, bottom=bottoms, color=COLORS[f"part-{source}"], label=label)
            bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    mean = sum(map(sum, copies)) / len(copies)
    axes.axhline(mean, color=COLORS["text"], linewidth=0.9, linestyle="--", label="mean")
    axes.margins(y=0.25)


def _describe(load: ExpertLoad, sums: Sequence[Sequence[Sequence[int]]], num_shown: int) -> str:
    parts = []
    for layer, copies in zip(load.layers, sums, strict=True):
        totals = [sum(row) for row in copies]
        idle = totals.count(0)
        parts.append(
            f"layer {layer}: the busiest expert, {totals.index(max(totals))}, has "
            f"{format_number(_measure_imbalance(copies))} times the mean"
            + (f", and {idle} of {len(totals)} have none" if idle else "")
        )
    rest = f" The {num_shown} most uneven layers are drawn." if num_shown < len(load.layers) else ""
    shown = parts[:_MOST_LAYERS]
    return (
        f"{load.num_experts} experts, top {load.top_k}, sums over {len(load.copies)} steps. "
        + "; ".join(shown)
        + "."
        + rest
    )

"""Loss, gradient norm and learning rate of golden and layout over the steps, and their difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from moeverify.report.numbers import format_number
from moeverify.report.pictures.picture import Picture, make_figure, scale_by_powers
from moeverify.report.pictures.theme import COLORS
from moeverify.results.run import CaseResult

TITLE = "Loss, gradient norm and learning rate"
_RATE = "learning rate"
_Pairs = Sequence[tuple[float, float]]


def draw(case: CaseResult) -> Picture | None:
    """Return the curves; None if no step was trained."""
    known = [
        (name, pairs)
        for name, pairs in (
            ("loss", case.losses),
            ("gradient norm", case.gradient_norms),
            (_RATE, case.learning_rates),
        )
        if pairs
    ]
    if not known:
        return None
    figure = make_figure((4.4 if len(known) < 3 else 3.2) * len(known), 3.6)
    grid = figure.subplots(2, len(known), squeeze=False, sharex="col", height_ratios=(3, 2))
    for column, (name, pairs) in enumerate(known):
        _draw_values(grid[0][column], name, pairs)
        _draw_difference(grid[1][column], pairs)
    return Picture(TITLE, " ".join(_describe(case, name, pairs) for name, pairs in known), figure)


def _draw_values(axes: Axes, name: str, pairs: _Pairs) -> None:
    steps = range(len(pairs))
    expected, actual = ([pair[side] for pair in pairs] for side in (0, 1))
    axes.plot(
        steps,
        expected,
        color=COLORS["expected"],
        linewidth=5,
        alpha=0.45,
        marker="o",
        markersize=6,
        label="golden",
    )
    axes.plot(steps, actual, color=COLORS["actual"], linewidth=1.8, marker="o", markersize=3, label="layout")
    axes.set_title(name)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(visible=True)
    axes.margins(y=0.15)
    axes.legend(loc="best")


def _draw_difference(axes: Axes, pairs: _Pairs) -> None:
    """Draw relative differences on a logarithmic scale; equal values are omitted."""
    found = {step: difference for step, pair in enumerate(pairs) if (difference := _differ(pair)) > 0.0}
    finite = {step: value for step, value in found.items() if math.isfinite(value)}
    if finite:
        scale_by_powers(axes, "y")
        axes.plot(
            list(finite),
            list(finite.values()),
            color=COLORS["mismatch"],
            marker="o",
            markersize=4,
            linewidth=1,
        )
        axes.set_ylim(min(finite.values()) / 30, max(finite.values()) * 30)
        axes.grid(visible=True)
    else:
        axes.set_yticks([])
        words = "not finite" if found else "equal at every step"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=COLORS["dim"])
    axes.set_xticks(
        range(len(pairs)) if len(pairs) <= 12 else range(0, len(pairs), math.ceil(len(pairs) / 12))
    )
    axes.set_xlim(-0.3, len(pairs) - 0.7)
    axes.set_xlabel("step")
    axes.set_title("relative difference", color=COLORS["dim"], fontsize=8)


def _differ(pair: tuple[float, float]) -> float:
    expected, actual = pair
    if expected == actual:
        return 0.0
    difference = abs(actual - expected) / abs(expected) if expected else math.inf
    return difference if math.isfinite(difference) else math.inf


def _describe(case: CaseResult, name: str, pairs: _Pairs) -> str:
    worst = max(range(len(pairs)), key=lambda step: _differ(pairs[step]))
    difference = _differ(pairs[worst])
    if difference == 0.0:
        return f"The {name} of golden and layout is equal at all {len(pairs)} steps."
    if name == _RATE:  # no check covers it directly; the optimizer step is checked
        return f"The {name} differs; its largest relative difference is {format_number(difference)}, at step {worst}."
    over = [finding.step for finding in case.findings if finding.check == name and finding.tensor == "total"]
    verdict = f"is over its bound from step {min(over)} on" if over else "is within its bound"
    return f"The {name} {verdict}; its largest relative difference is {format_number(difference)}, at step {worst}."

"""Errors, bounds and detection limits of all checks that measure relative errors."""

from __future__ import annotations

import math

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moeverify.report.numbers import format_count
from moeverify.report.pictures.picture import Picture, format_power, make_figure, scale_by_powers
from moeverify.report.pictures.theme import COLORS
from moeverify.report.sanitize import clean
from moeverify.results.finding import MAX_CONCLUSIVE, CheckResult
from moeverify.results.run import CaseResult

TITLE = "Bounds and detection limits"
_LEAST = 1e-18  # position of an error of zero


def draw(case: CaseResult) -> Picture | None:
    """Return one line per check with a positive bound; None if no check has one."""
    measured = [
        check
        for check in case.checks
        if check.worst is not None and check.limits is not None and 0.0 < check.worst.bound < math.inf
    ]
    if not measured:
        return None
    figure = make_figure(8.0, 1.0 + 0.3 * len(measured))
    axes = figure.add_subplot()
    scale_by_powers(axes, "x")
    axes.xaxis.set_major_formatter(lambda value, _: "0" if value <= _LEAST else format_power(value))
    for row, check in enumerate(measured):
        assert check.worst is not None
        if check.limits is not None and check.limits.worst > 0.0:
            least = max(min(check.limits.median, check.limits.worst), _LEAST)
            most = check.limits.worst if math.isfinite(check.limits.worst) else 1e3
            axes.plot(
                [least, max(most, least * 1.3)],
                [row, row],
                color=COLORS["line"],
                linewidth=7,
                solid_capstyle="butt",
            )
        error = _bring_into_view(check.worst.error)
        color = COLORS["pass" if check.verdict == "pass" else "mismatch"]
        axes.plot([error, check.worst.bound], [row, row], color=color, linewidth=0.8, linestyle=":")
        axes.plot(
            [check.worst.bound], [row], marker="|", markersize=11, markeredgewidth=2, color=COLORS["text"]
        )
        marker = "o" if check.verdict == "pass" else "X"
        axes.plot([error], [row], marker=marker, markersize=6, color=color, linestyle="none")
    axes.axvline(MAX_CONCLUSIVE, color=COLORS["skipped"], linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(measured)), [clean(check.name) for check in measured])
    axes.set_ylim(len(measured) - 0.4, -0.6)
    axes.grid(visible=True, axis="x")
    axes.set_xlabel("relative error")
    figure.legend(handles=_make_legend(), loc="outside upper left", ncols=5)
    return Picture(TITLE, _describe(measured), figure)


def _bring_into_view(error: float) -> float:
    if not math.isfinite(error):
        return 1e3
    return max(error, _LEAST)


def _make_legend() -> list[Line2D | Patch]:
    def mark(marker: str, color: str, label: str) -> Line2D:
        return Line2D(
            [], [], marker=marker, color=COLORS[color], linestyle="none", label=label, markeredgewidth=1.5
        )

    return [
        mark("o", "pass", "worst error, within"),
        mark("X", "mismatch", "worst error, over"),
        mark("|", "text", "its bound"),
        Patch(color=COLORS["line"], label="limits: median to worst tensor"),
        Line2D([], [], color=COLORS["skipped"], linestyle="--", label="inconclusive above"),
    ]


def _describe(measured: list[CheckResult]) -> str:
    failed = [clean(check.name) for check in measured if check.verdict != "pass"]
    inconclusive = sum(check.inconclusive for check in measured)
    text = f"{len(measured)} checks; " + (
        f"over the bound: {', '.join(failed)}" if failed else "all within their bounds"
    )
    unseen = "An error below a detection limit would not have been seen."
    return f"{text}. {unseen} {format_count(inconclusive, 'tensor')} inconclusive."

"""A histogram of actual over expected: wrong factors stand apart from the correct tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from moeverify.report.numbers import format_count
from moeverify.report.pictures.picture import Picture, make_figure
from moeverify.report.pictures.theme import COLORS
from moeverify.report.sanitize import clean
from moeverify.report.sorting import order_findings
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult

TITLE = "Actual over expected"
_REACH = 4.0  # powers of 2 to either side
_BINS_EACH = 8  # bins per factor of 2
_NOT_POSITIVE = -_REACH - 1.0


def draw(case: CaseResult) -> Picture | None:
    """Return the histogram for the first finding's check and step; None if no factor was fitted."""
    first = next(iter(order_findings(case.findings)), None)
    if first is None:
        return None
    alike = [each for each in case.findings if (each.check, each.step) == (first.check, first.step)]
    fitted = [each for each in alike if each.scale is not None and math.isfinite(each.scale)]
    if not fitted:
        return None
    explained = set(first.explanation.subject.tensors) if first.explanation is not None else {first.tensor}
    origin = [_place(each) for each in fitted if each.tensor in explained]
    others = [_place(each) for each in fitted if each.tensor not in explained]
    num_right = _count_right(case, first)
    figure = make_figure(7.0, 2.6)
    axes = figure.add_subplot()
    _draw_bars(axes, origin, others, num_right)
    return Picture(TITLE, _describe(first, fitted, num_right), figure)


def _place(finding: Finding) -> float:
    """Return the position of a factor: its clamped power of 2; nonpositive factors go to the far left."""
    assert finding.scale is not None
    if finding.scale <= 0.0:
        return _NOT_POSITIVE
    return min(max(math.log2(finding.scale), -_REACH), _REACH)


def _count_right(case: CaseResult, first: Finding) -> int:
    """Return how many tensors of the same check and step are within their bounds."""
    for each in case.errors:
        if each.check == first.check and first.step in each.steps:
            at = each.steps.index(first.step)
            return sum(row[at] is not None and not _is_over(row[at]) for row in each.shares)
    return 0


def _is_over(share: float | None) -> bool:
    return share is not None and not share <= 1.0


def _draw_bars(axes: Axes, origin: Sequence[float], others: Sequence[float], num_right: int) -> None:
    size = 1.0 / _BINS_EACH
    bottoms: dict[int, int] = {}
    parts = (
        ("within the bound", "heat-0", [0.0] * num_right),
        ("over the bound", "heat-3", others),
        ("explained by the first cause", "heat-4", origin),
    )
    for label, color, values in parts:
        counts: dict[int, int] = {}
        for value in values:
            at = round(value * _BINS_EACH)
            counts[at] = counts.get(at, 0) + 1
        if not counts:
            continue
        axes.bar(
            [at * size for at in counts],
            list(counts.values()),
            width=size * 0.92,
            bottom=[bottoms.get(at, 0) for at in counts],
            color=COLORS[color],
            label=label,
        )
        for at, count in counts.items():
            bottoms[at] = bottoms.get(at, 0) + count
    for at, count in bottoms.items():
        axes.text(at * size, count, str(count), ha="center", va="bottom", fontsize=8)
    powers = range(-int(_REACH), int(_REACH) + 1)
    names = [f"1/{2**-power}" if power < 0 else str(2**power) for power in powers]
    names[0], names[-1] = f"{names[0]} or less", f"{names[-1]} or more"
    ticks = [float(power) for power in powers]
    if _NOT_POSITIVE in (*origin, *others):
        ticks, names = [_NOT_POSITIVE, *ticks], ["0 or less", *names]
    axes.set_xticks(ticks, names)
    axes.set_xlim(ticks[0] - 0.5, ticks[-1] + 0.5)
    axes.set_xlabel("fitted factor: actual = factor * expected")
    axes.set_ylabel("tensors")
    axes.margins(y=0.15)
    axes.legend(loc="upper right")


def _describe(first: Finding, fitted: Sequence[Finding], num_right: int) -> str:
    step = f" at step {first.step}" if first.step >= 0 else ""
    text = (
        f"Tensors of the check {clean(first.check)}{step}: {format_count(len(fitted), 'tensor')} over the bound, "
        f"{num_right} within it."
    )
    factors: dict[str, int] = {}
    for each in fitted:
        assert each.scale is not None
        name = f"{each.scale:.3g}"
        factors[name] = factors.get(name, 0) + 1
    most = sorted(factors.items(), key=lambda item: -item[1])[:3]
    return f"{text} Most frequent factors: " + ", ".join(f"{name} ({count})" for name, count in most) + "."

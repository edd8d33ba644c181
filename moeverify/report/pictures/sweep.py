"""A sweep of `moeverify bench`: tokens per second and memory over one field, a line per other values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from moeverify.cases.override import label_values
from moeverify.report.pictures.picture import Picture, make_figure
from moeverify.report.pictures.theme import COLORS
from moeverify.report.sanitize import clean
from moeverify.results.measurement import Measurement

TITLE = "Sweep"
_GIB = 2.0**30
_NUM_COLORS = 8


def draw(cases: Sequence[Measurement]) -> Picture | None:
    """Return the curves over the last swept field; None without a sweep or measurements."""
    measured = [case for case in cases if case.swept and case.step is not None]
    if not measured:
        return None
    field = list(measured[0].swept)[-1]
    values = list(dict.fromkeys(case.swept[field] for case in cases if case.swept))
    lines: dict[str, list[Measurement]] = defaultdict(list)
    for case in measured:
        lines[_name_line(case, field)].append(case)
    figure = make_figure(9.2, 3.6)
    speed, memory = figure.subplots(1, 2)
    _draw(speed, lines, field, values, "tokens a second", lambda case: case.tokens_per_second)
    _draw(memory, lines, field, values, "peak memory of a rank, GiB", _find_memory)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
    best = max(measured, key=lambda case: case.tokens_per_second or 0.0)
    caption = f"Most tokens a second: {clean(best.name)}, {best.tokens_per_second or 0.0:.4g}."
    return Picture(f"{TITLE} over {clean(field)}", caption, figure)


def _name_line(case: Measurement, field: str) -> str:
    """Return the case's name with the values of all fields except the one on the x axis."""
    plain = case.name.removesuffix(f" {label_values(case.swept)}")
    others = label_values({path: value for path, value in case.swept.items() if path != field})
    return f"{plain} {others}".rstrip()


def _draw(
    axes: Axes,
    lines: dict[str, list[Measurement]],
    field: str,
    values: Sequence[str],
    title: str,
    read: Callable[[Measurement], float | None],
) -> None:
    for number, (name, cases) in enumerate(lines.items()):
        points = [(values.index(case.swept[field]), read(case)) for case in cases]
        known = [(at, value) for at, value in points if value is not None]
        color = COLORS[f"part-{number % _NUM_COLORS}"]
        axes.plot(
            [at for at, _ in known], [value for _, value in known], color=color, marker="o", label=clean(name)
        )
    axes.set_xticks(range(len(values)), [clean(value) for value in values])
    axes.set_xlabel(clean(field))
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_title(title)
    axes.grid(visible=True)


def _find_memory(case: Measurement) -> float | None:
    return None if case.peak_memory is None else case.peak_memory / _GIB

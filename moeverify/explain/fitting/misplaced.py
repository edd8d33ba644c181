"""Parameters whose shape under the layout differs from the single device: wrong placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.engine import DiagnosedCause
from moeverify.explain.fitting.factors import find_factor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.operation import Misplaced

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # name -> (expected, actual)


def explain_shapes(shapes: Shapes, axes: Axes) -> list[DiagnosedCause]:
    """Return one cause for all parameters whose shapes differ along the same dim by the same factor."""
    groups: dict[tuple[int | None, float], list[str]] = {}
    for name, (expected, actual) in shapes.items():
        groups.setdefault(_compare(expected, actual), []).append(name)
    return [
        DiagnosedCause((), _explain(names, shapes[names[0]], dim, factor, axes))
        for (dim, factor), names in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def _compare(expected: Sequence[int], actual: Sequence[int]) -> tuple[int | None, float]:
    """Return the only dim in which two shapes differ, and the factor; (None, 0.0) for other differences."""
    if len(expected) != len(actual):
        return None, 0.0
    dims = [dim for dim, (one, other) in enumerate(zip(expected, actual, strict=True)) if one != other]
    if len(dims) != 1 or not expected[dims[0]] or actual[dims[0]] % expected[dims[0]]:
        return None, 0.0
    return dims[0], actual[dims[0]] / expected[dims[0]]


def _explain(
    names: Sequence[str],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dim: int | None,
    factor: float,
    axes: Axes,
) -> Explanation:
    found = find_factor(factor, axes.sources_of(*names)) if dim is not None else None
    operation = Misplaced(
        expected=shapes[0],
        actual=shapes[1],
        dim=dim,
        axes=() if found is None else tuple(each for each in found.equals if len(each.times) == 1),
    )
    subject = Subject(quantity=Quantity.INITIAL_VALUE, tensors=tuple(names))
    return Explanation(cause=Cause.LAYOUT, subject=subject, operation=operation)

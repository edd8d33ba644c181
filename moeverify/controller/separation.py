"""Ends an ambiguity: a layout of the same recipe under which axes of one size have different sizes. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from moeverify.axes.groups import list_degrees, list_groups
from moeverify.axes.registry import DEGREES
from moeverify.case.schema import Case, Layout
from moeverify.diagnose.verdict import measure_axis, split_axis
from moeverify.results.cause import Cause
from moeverify.results.finding import Finding, FollowUp
from moeverify.validation.rules import validate

_VARIED = sorted((axis for axis in DEGREES if axis.is_varied), key=lambda axis: axis.places_experts)
_DEGREES = (*(axis.degree for axis in _VARIED), "micro_batches")
_SIZES = (1, 2, 3, 4, 6, 8)
_AMBIGUOUS = (Cause.SCALE, Cause.TERM_SCALE, Cause.MISSING_REDUCTION, Cause.METRIC, Cause.NORM)


def propose(case: Case, finding: Finding, most_ranks: int) -> Finding:
    """Return the finding, with the layout that tells its axes apart where several explain it equally well."""
    axes = finding.place.axes if finding.place is not None else ()
    if len(axes) < 2 or finding.code not in _AMBIGUOUS:
        return finding
    by_ranks = finding.code == Cause.MISSING_REDUCTION
    limit = min(
        most_ranks, max(4, 2 * case.layout.world_size)
    )  # a machine that allows 64 ranks is slow with them
    changed = separate(case, axes, limit, by_ranks=by_ranks)
    return (
        finding.model_copy(update={"follow_up": FollowUp(axes=axes, layout=changed)}) if changed else finding
    )


def separate(case: Case, axes: Sequence[str], most_ranks: int, *, by_ranks: bool) -> dict[str, int]:
    """Return what to change in the layout to tell these axes best apart; nothing where no layout does.

    Of layouts that tell equally many apart, one with few ranks is taken, and of these one that changes little.
    With `by_ranks` other groups of ranks are enough, else the sizes must differ.
    """
    best: tuple[tuple[int, int, int], dict[str, int]] | None = None
    for changed in _list_changes(case.layout, most_ranks):
        other = change_layout(case, changed)
        if other.layout.world_size > most_ranks or validate(other):
            continue
        rank = (-count_apart(other, axes, by_ranks=by_ranks), other.layout.world_size, len(changed))
        if rank[0] < -1 and (best is None or rank < best[0]):
            best = (rank, changed)
    return best[1] if best is not None else {}


def change_layout(case: Case, changed: dict[str, int]) -> Case:
    """Return the case under a layout with other degrees."""
    return case.model_copy(update={"layout": case.layout.model_copy(update=changed)})


def count_apart(case: Case, axes: Sequence[str], *, by_ranks: bool) -> int:
    """Return how many of these axes the case's layout tells apart.

    0 where one of them has a single rank there: what such an axis does wrong cannot be seen.
    """
    degrees, groups = list_degrees(case), list_groups(case)
    sizes = [measure_axis(axis, degrees) for axis in axes]
    if 1.0 in sizes or any(measure_axis(part, degrees) == 1.0 for axis in axes for part in split_axis(axis)):
        return 0
    return len({str(groups.get(axis)) for axis in axes} if by_ranks else set(sizes))


def _list_changes(layout: Layout, most_ranks: int) -> Iterator[dict[str, int]]:
    """Yield what to change in the degrees of a layout, small changes first."""
    choices = {
        name: [size for size in _SIZES if size <= most_ranks and size != getattr(layout, name)]
        for name in _DEGREES
    }
    for number in (1, 2, 3):
        for names in itertools.combinations(_DEGREES, number):
            for sizes in itertools.product(*(choices[name] for name in names)):
                yield dict(zip(names, sizes, strict=True))

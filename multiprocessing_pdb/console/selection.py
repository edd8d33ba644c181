"""Selections of ranks, such as `@all`, `@0,2:8:2`, `@tp=1`, `@dp=0,tp=0:2` and `@p71`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from multiprocessing_pdb.console.target import Target

_NUMBER = re.compile(r"\d+")
_SLICE = re.compile(r"(\d*):(\d*)(?::(\d*))?")
_AXIS = re.compile(r"([A-Za-z_][\w-]*)=(.+)")
_LABEL = re.compile(r"[\w.]+")


class SelectionError(ValueError):
    """An invalid selection, or one that matches nothing."""


def _parse_numbers(term: str) -> Callable[[int], bool] | None:
    if _NUMBER.fullmatch(term):
        wanted = int(term)
        return lambda number: number == wanted
    match = _SLICE.fullmatch(term)
    if match is None:
        return None
    begin, end, step = (int(part) if part else None for part in match.groups())
    if step == 0:
        raise SelectionError(f"{term!r}: a step of 0")
    first = begin or 0
    return lambda n: n >= first and (end is None or n < end) and (n - first) % (step or 1) == 0


def select(text: str, targets: Sequence[Target]) -> list[Target]:
    """Return the targets that `text` (without the @) selects, in their order.

    Terms are separated by commas. Numbers, slices (end excluded, as in Python) and labels are a union, and
    so are terms of one axis. Terms of different axes, and the union of numbers and labels, are intersected.

    Raises SelectionError.
    """
    terms = [term for term in text.split(",") if term]
    if not terms:
        raise SelectionError("a selection is empty; try @all, @0,2:8:2 or @tp=1")
    if terms == ["all"]:
        return list(targets)
    named: set[int] = set()
    axes: dict[str, set[int]] = {}
    has_names = False
    for term in terms:
        axis = _AXIS.fullmatch(term)
        if axis is not None:
            axes.setdefault(axis[1], set()).update(_select_axis(axis[1], axis[2], targets))
        else:
            has_names = True
            named.update(_select_named(term, targets))
    chosen = [
        target
        for at, target in enumerate(targets)
        if (not has_names or at in named) and all(at in members for members in axes.values())
    ]
    if not chosen:
        raise SelectionError(f"@{text} selects none of the stopped ranks")
    return chosen


def _select_axis(axis: str, wanted: str, targets: Sequence[Target]) -> set[int]:
    if not any(axis in target.coordinates for target in targets):
        known = sorted({name for target in targets for name in target.coordinates})
        raise SelectionError(f"no stopped rank has a mesh axis {axis!r}; known: {', '.join(known) or 'none'}")
    holds = _parse_numbers(wanted)
    if holds is None:
        raise SelectionError(f"{axis}={wanted}: expected a number or a slice")
    return {
        at
        for at, target in enumerate(targets)
        if axis in target.coordinates and holds(target.coordinates[axis])
    }


def _select_named(term: str, targets: Sequence[Target]) -> set[int]:
    holds = _parse_numbers(term)
    if holds is not None:
        return {at for at, t in enumerate(targets) if t.number is not None and holds(t.number)}
    if not _LABEL.fullmatch(term):
        raise SelectionError(f"{term!r} is no rank, slice, axis=place or label")
    found = {at for at, target in enumerate(targets) if target.label == term}
    if not found:
        raise SelectionError(f"no stopped rank is called {term!r}")
    return found

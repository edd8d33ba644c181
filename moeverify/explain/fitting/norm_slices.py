"""Gradient norms whose squares are not summed over a mesh axis, for all parameters or for a group of them.

The ranks at one coordinate of an axis hold a slice of the gradients: their own shards, and everything that
the axis replicates. If the sum over the axis is missing, each rank may report the norm of its own slice.
Ranks may also combine the norms of the slices by a mean or a sum, or all use the norm of one coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.families import name_family
from moeverify.results.factor import Product
from moeverify.results.facts import ClipFacts
from moeverify.results.operation import NormOfSlices
from moeverify.results.part import Group

_Combination = Literal["mean", "sum", "root-mean-square"]

_COMBINE: Mapping[_Combination, Callable[[Sequence[float]], float]] = {
    "mean": lambda squares: (sum(map(math.sqrt, squares)) / len(squares)) ** 2,
    "sum": lambda squares: sum(map(math.sqrt, squares)) ** 2,
    "root-mean-square": lambda squares: sum(squares) / len(squares),
}

# About a hundred combinations of axes, parameters and formulas are tried. With this tolerance, each fits
# one in ten thousand norms that are wrong for another reason. Norms known less precisely are not examined.
_MOST_NOISE = 1e-5
_LEAST_SHARE = 1e-5  # of the square that is missing; a smaller one leaves too few digits


def find_norm_of_slices(facts: ClipFacts, axes: Axes, *, noise: float) -> NormOfSlices | None:
    """Return the axes and parameters over which a norm is not summed; None if nothing fits.

    `noise` is the relative rounding error of a squared norm.
    """
    if not facts.held or noise > _MOST_NOISE or not all(map(math.isfinite, facts.norms)):
        return None
    divisions = dict(_list_divisions(axes, len(facts.norms)))
    for group in _list_groups(facts):
        slices = {name: _measure(facts, group, each) for name, each in divisions.items()}
        total = sum(facts.squares.values())
        known = {
            name: squares
            for name, squares in slices.items()
            if min(squares) > 0.0 and total - min(squares) > _LEAST_SHARE * total
        }
        own = [name for name, squares in known.items() if _is_own(facts, divisions[name], squares, noise)]
        if own:
            return NormOfSlices(combination="own", axes=_name(own), group=group)
        if len(set(facts.norms)) > 1:
            continue
        one = _find_one(facts, known, group, noise)
        if one is not None:
            return one
        combined = _find_combination(facts, known, group, noise)
        if combined is not None:
            return combined
    return None


def _find_combination(
    facts: ClipFacts, slices: Mapping[tuple[str, ...], Sequence[float]], group: Group | None, noise: float
) -> NormOfSlices | None:
    """Return the formula by which a common norm combines the norms of the slices, or None."""
    inside = set(facts.squares if group is None else group.tensors)
    others = sum(square for name, square in facts.squares.items() if name not in inside)
    square = facts.norms[0] ** 2
    for combination, combine in _COMBINE.items():
        for apart in (0.0,) if group is None else (0.0, others):
            found = [
                name
                for name, squares in slices.items()
                if abs(combine([max(each - apart, 0.0) for each in squares]) + apart - square)
                <= noise * square
            ]
            if found:
                is_apart = apart > 0.0
                return NormOfSlices(
                    combination=combination, axes=_name(found), group=group, is_apart=is_apart
                )
    return None


_Division = Sequence[frozenset[int]]


def _list_divisions(axes: Axes, num_ranks: int) -> Iterator[tuple[tuple[str, ...], _Division]]:
    """Yield the sets of ranks at each coordinate of each axis, and of each pair of axes."""
    single: dict[tuple[str, ...], _Division] = {}
    for axis, groups in axes.groups.items():
        width = max(map(len, groups), default=0)
        is_whole = all(len(group) == width for group in groups) and sum(map(len, groups)) == num_ranks
        if width > 1 and is_whole:
            single[(axis,)] = [frozenset(group[place] for group in groups) for place in range(width)]
    yield from single.items()
    for (one, first), (other, second) in combinations(single.items(), 2):
        both = [left & right for left in first for right in second if left & right]
        if len(both) == len(first) * len(second):
            yield (*one, *other), both


def _list_groups(facts: ClipFacts) -> Iterator[Group | None]:
    """Yield None for all parameters, then each family and its complement, if both exist."""
    yield None
    families = {name: name_family([name]) for name in facts.squares}
    for family in dict.fromkeys(filter(None, families.values())):
        own = tuple(name for name in facts.squares if families[name] == family)
        others = tuple(name for name in facts.squares if families[name] != family)
        if others:
            yield Group(tensors=own, family=family)
            yield Group(tensors=others, family=family, is_outside=True)


def _measure(facts: ClipFacts, group: Group | None, division: _Division) -> list[float]:
    """Return the squared norm of each slice: its ranks' part of a group, and everything outside the group."""
    inside = set(facts.squares if group is None else group.tensors)
    others = sum(square for name, square in facts.squares.items() if name not in inside)
    measured = []
    for ranks in division:
        square = others
        for name in inside:
            regions: dict[str, float] = {}
            for rank, known in facts.held[name].items():
                regions.update(known if rank in ranks else {})
            square += sum(regions.values())
        measured.append(square)
    return measured


def _is_own(facts: ClipFacts, division: _Division, squares: Sequence[float], noise: float) -> bool:
    """Return whether each rank has the norm of its own slice."""
    return all(
        abs(facts.norms[rank] ** 2 - square) <= noise * square
        for ranks, square in zip(division, squares, strict=True)
        for rank in ranks
    )


def _find_one(
    facts: ClipFacts, slices: Mapping[tuple[str, ...], Sequence[float]], group: Group | None, noise: float
) -> NormOfSlices | None:
    """Return the one slice whose norm all ranks have, or None.

    The coordinate is set if all fitting axes agree in it.
    """
    square = facts.norms[0] ** 2
    places: dict[tuple[str, ...], int] = {}
    for name, squares in slices.items():
        fitting = [place for place, each in enumerate(squares) if abs(each - square) <= noise * square]
        if fitting:
            places[name] = fitting[0]
    if not places:
        return None
    axes = _name(list(places))
    found = {axis.times: places[axis.times] for axis in axes}
    agree = len(set(found.values())) == 1 and all(len(name) == 1 for name in found)
    return NormOfSlices(
        combination="one",
        axes=axes,
        group=group,
        coordinate=next(iter(found.values())) if agree else None,
        is_largest=all(slices[name][place] == max(slices[name]) for name, place in found.items()),
    )


def _name(found: Sequence[tuple[str, ...]]) -> tuple[Product, ...]:
    """Return the axes that fit; single axes are preferred to pairs."""
    fewest = min(map(len, found))
    return tuple(Product(times=names) for names in found if len(names) == fewest)

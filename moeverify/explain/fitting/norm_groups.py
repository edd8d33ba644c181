"""Groups of parameters whose squares a gradient norm counts several times, or not at all.

Groups are tried from simple to complex: first the parameters that an axis replicates or shards. Next come
the experts and all others, which lie on different meshes if both are sharded. Then follow families of
parameters, and single ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.families import family_of, name_family
from moeverify.results.part import Contribution, Group, Part

Parts = Mapping[str, Mapping[int, str]]
"""By parameter and rank, the key of the region that the rank holds."""

# Tolerance for an integer count. In float64 the squared norm is known to 1e-14. A group whose squares are
# less than 1e-5 of the total leaves fewer digits and is skipped.
#
# A narrower norm leaves fewer digits still. Of 100 groups, about ten have squares as large as the excess.
# With a tolerance of 4e-3, their counts are integers by chance in 10 * 2 * 4e-3 = 8 % of norms that are
# wrong for another reason. A float32 norm reaches this at an excess of 2e-4; the share falls as the excess
# grows.
_WHOLE, _LEAST_SHARE, _MOST_WHOLE = 1e-6, 1e-5, 4e-3


def find_miscounted_group(
    excess: float, squares: Mapping[str, float], parts: Parts, axes: Axes, *, noise: float = 0.0
) -> Contribution | None:
    """Return the one group that a squared norm counts k times, where k is an integer other than 1.

    `excess` is the error of the squared norm, `squares` has the squared gradient norm of each parameter,
    and `noise` is the relative rounding error of the squared norm. Return None if no group explains the
    excess, if disjoint groups do, or if the excess is not finite.
    """
    if not math.isfinite(excess):
        return None
    total = sum(squares.values())
    # More copies than ranks are impossible, and a large enough count fits any number.
    most = max((source.size for source in axes.sources), default=1)
    found: list[tuple[Group, int]] = []
    for group in _list_groups(squares, parts, axes):
        square = sum(squares[name] for name in group.tensors)
        if square < _LEAST_SHARE * total:
            continue
        count, whole = 1.0 + excess / square, max(_WHOLE, noise * total / square)
        is_whole = whole <= _MOST_WHOLE and abs(count - round(count)) <= whole
        if is_whole and round(count) != 1 and 0 <= round(count) <= most:
            found.append((group, round(count)))
    if not found or any(not _overlap(found[0][0], group) for group, _ in found[1:]):
        return None
    group, times = found[0]
    # Prefer the axis that defines the group: another axis of the same size defines a group that does not
    # fit.
    tested = [source for source in axes.sources if source.name == group.axis]
    factor = find_factor(float(times), tested)
    factor = factor if factor.equals else find_factor(float(times), axes.sources)
    return Contribution(part=Part(group=group), factor=factor)


def _list_pairs(squares: Mapping[str, float], parts: Parts, axes: Axes) -> Iterator[tuple[Group, Group]]:
    """Yield, for each axis, the parameters that it replicates and those that it shards."""
    for axis, ranks in axes.groups.items():
        replicated = tuple(name for name in squares if _is_replicated(parts[name], ranks))
        sharded = tuple(name for name in squares if name not in replicated)
        if replicated and sharded:
            yield (
                Group(tensors=replicated, axis=axis, placement="replicated"),
                Group(tensors=sharded, axis=axis, placement="sharded"),
            )


def _list_apart(squares: Mapping[str, float]) -> Iterator[tuple[Group, Group]]:
    """Yield, for each named family, its parameters and all others."""
    names = {name: name_family([name]) for name in squares}
    for family in dict.fromkeys(filter(None, names.values())):
        own = tuple(name for name in squares if names[name] == family)
        others = tuple(name for name in squares if names[name] != family)
        if len(own) > 1 and len(others) > 1:
            yield (
                Group(tensors=own, family=family),
                Group(tensors=others, family=family, is_outside=True),
            )


def _list_kinds(squares: Mapping[str, float], parts: Parts) -> Iterator[Group]:
    """Yield vectors and matrices, which optimizers group separately.

    Flat shards do not show the difference.
    """
    dims = {name: {key.count(",") for key in parts[name].values()} for name in squares}
    flat = any(key.startswith("flat") for name in squares for key in parts[name].values())
    vectors = tuple(name for name in squares if dims[name] == {0})
    matrices = tuple(name for name in squares if name not in vectors)
    if vectors and matrices and not flat:
        yield from (Group(tensors=vectors, family="vector"), Group(tensors=matrices, family="matrix"))


def _overlap(first: Group, second: Group) -> bool:
    return not set(first.tensors).isdisjoint(second.tensors)


def _list_groups(squares: Mapping[str, float], parts: Parts, axes: Axes) -> Iterator[Group]:
    """Yield groups of parameters with a common trait, those of an axis first."""
    for pair in (*_list_pairs(squares, parts, axes), *_list_apart(squares)):
        yield from pair
    yield from _list_kinds(squares, parts)
    families: dict[str, list[str]] = {}
    for name in squares:
        families.setdefault(family_of(name), []).append(name)
    yield from (Group(tensors=tuple(names)) for names in families.values())
    yield from (Group(tensors=(name,)) for names in families.values() if len(names) > 1 for name in names)


def _is_replicated(parts: Mapping[int, str], groups: Sequence[Sequence[int]]) -> bool:
    """Return whether the ranks of each group hold the same part of a parameter."""
    held = [[parts[rank] for rank in group if rank in parts] for group in groups]
    return any(len(part) > 1 for part in held) and all(len(set(part)) <= 1 for part in held)

"""Part of the parameters that is affected: the simplest traits that select exactly the affected ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from moeverify.explain.fitting.axes import Groups
from moeverify.explain.fitting.families import number_layer
from moeverify.parallel.regions.region import Region
from moeverify.results.parameter_part import ParameterPart, Trait

_LEAST_BITS = 6.0
"""Minimum of bits that a description saves compared with a list of names; less may be chance."""

_MOST_ALTERNATIVES = 1
"""Number of equally simple descriptions that are reported in addition."""

_INSIDE = ("norm", "bias")
"""Words that also match within a component of a name: `attention_norm`, `up_bias`."""

Regions = Mapping[str, Mapping[int, Region]]


@dataclass(frozen=True)
class _Described:
    """A trait, the parameters that have it, and the number of traits of its kind.

    `end` is the parameter at which a range begins or ends.
    """

    trait: Trait
    members: frozenset[str]
    cost: int
    num_alike: int
    end: str | None = None


@dataclass(frozen=True)
class _Choice:
    """One trait or two, the parameters that have them, and the cost of the description."""

    traits: tuple[Trait, ...]
    members: frozenset[str]
    cost: int
    bits: float


def find_part(
    affected: Collection[str],
    unaffected: Collection[str],
    regions: Regions,
    groups: Groups,
    doubtful: Collection[str] = (),
) -> ParameterPart | None:
    """Return the traits that exactly the affected parameters have; None if nothing simple fits.

    Parameters that are neither affected nor unaffected, because an error would be invisible, may have the
    traits too, if they are fewer. `doubtful` parameters are wrong in an unknown way, possibly in this one.
    If one of them lies outside of the part, the part may be too small, and the result is None. `regions`
    must be in the order of registration.
    """
    inside, outside = frozenset(affected), frozenset(unaffected)
    if len(inside) < 2 or not outside or not inside <= set(regions):
        return None
    traits = [each for each in _list_traits(list(regions), regions, groups) if inside <= each.members]
    # Ranges may differ only in parameters of neither kind: keep those that begin or end with an affected
    # one.
    traits = [each for each in traits if each.end is None or each.end in inside]
    found = [each for each in _list_choices(traits) if not each.members & outside]
    found = [each for each in found if each.bits + _LEAST_BITS <= _count_bits(each.members, outside, inside)]
    if not found:
        return None
    found.sort(key=lambda each: (each.cost, each.bits))
    simplest = found[0]
    if not simplest.members.issuperset(doubtful):
        return None
    # Only norms have one dim, so either trait may be the right one.
    as_simple = [
        each.traits
        for each in found[1:]
        if each.cost == simplest.cost
        and len(each.traits) == len(simplest.traits)
        and each.members == simplest.members
    ]
    return ParameterPart(
        traits=simplest.traits,
        count=len(inside),
        total=len(simplest.members | outside),
        unseen=len(simplest.members - inside),
        alternatives=tuple(as_simple[:_MOST_ALTERNATIVES]),
    )


def _count_bits(members: frozenset[str], outside: frozenset[str], inside: frozenset[str]) -> float:
    """Return the length of a list of the affected names in bits; 0 if at least half of the part is unseen."""
    if len(members) >= 2 * len(inside):
        return 0.0
    return math.log2(math.comb(len(inside) + len(outside), len(inside)))


def _list_choices(traits: Sequence[_Described]) -> Iterator[_Choice]:
    """Yield each trait alone, and each pair of traits of different kinds."""
    for each in traits:
        yield _Choice((each.trait,), each.members, each.cost, math.log2(each.num_alike))
    for one, other in combinations(traits, 2):
        are_sizes = {one.trait.kind, other.trait.kind} <= {"larger", "smaller"}
        if one.trait.kind != other.trait.kind and not are_sizes:
            bits = math.log2(one.num_alike) + math.log2(other.num_alike)
            cost = one.cost + other.cost + 3
            yield _Choice((one.trait, other.trait), one.members & other.members, cost, bits)


def _list_traits(names: Sequence[str], regions: Regions, groups: Groups) -> Iterator[_Described]:
    """Yield all traits that distinguish parameters; simple traits have a low cost."""
    words = sorted({word for name in names for word in name.split(".") if not word.isdigit()})
    words += [each for each in _INSIDE if each not in words and any(each in word for word in words)]
    for word in words:
        members = frozenset(name for name in names if _has_word(name, word))
        yield _Described(Trait(kind="named", name=word), members, 0, 2 * len(words))
        yield _Described(Trait(kind="not-named", name=word), frozenset(names) - members, 2, 2 * len(words))
    shapes = {name: next(iter(regions[name].values())).shape for name in names}
    for dims in sorted({len(shape) for shape in shapes.values()}):
        members = frozenset(name for name in names if len(shapes[name]) == dims)
        yield _Described(Trait(kind="dims", numbers=(dims,)), members, 0, 4)
    yield from _list_layers(names)
    for at in range(1, len(names)):
        count, after, before = 2 * len(names), frozenset(names[at:]), frozenset(names[:at])
        yield _Described(Trait(kind="from", name=names[at]), after, 4, count, names[at])
        yield _Described(Trait(kind="before", name=names[at]), before, 4, count, names[at - 1])
    for first in (0, 1):
        yield _Described(Trait(kind="every-other", numbers=(first,)), frozenset(names[first::2]), 5, 4)
    sizes = {name: math.prod(shapes[name]) for name in names}
    for size in sorted(set(sizes.values()))[1:]:
        larger = frozenset(name for name in names if sizes[name] >= size)
        yield _Described(Trait(kind="larger", numbers=(size,)), larger, 4, 2 * len(set(sizes.values())))
        smaller = frozenset(names) - larger
        yield _Described(Trait(kind="smaller", numbers=(size,)), smaller, 4, 2 * len(set(sizes.values())))
    yield from _list_placements(names, regions, groups)


def _has_word(name: str, word: str) -> bool:
    return word in name.split(".") or (word in _INSIDE and word in name)


def _list_layers(names: Sequence[str]) -> Iterator[_Described]:
    """Yield ranges of layers."""
    layers = {name: number for name in names if (number := number_layer(name)) is not None}
    numbers = sorted(set(layers.values()))
    ranges = [(first, last) for first in numbers for last in numbers if first <= last]
    for first, last in ranges:
        members = frozenset(name for name, number in layers.items() if first <= number <= last)
        trait = Trait(kind="layers", numbers=tuple(range(first, last + 1)))
        yield _Described(trait, members, 2, max(len(ranges), 2))


def _list_placements(names: Sequence[str], regions: Regions, groups: Groups) -> Iterator[_Described]:
    """Yield the axes that shard or replicate parameters, and the sets of ranks that hold them."""
    for axis, members in groups.items():
        sharded = frozenset(name for name in names if _is_sharded(regions[name], members))
        whole = frozenset(names) - sharded
        yield _Described(Trait(kind="sharded", name=axis), sharded, 2, 2 * len(groups))
        yield _Described(Trait(kind="replicated", name=axis), whole, 2, 2 * len(groups))
    holders = {name: tuple(sorted(regions[name])) for name in names}
    for ranks in sorted(set(holders.values())):
        held = frozenset(name for name in names if holders[name] == ranks)
        yield _Described(Trait(kind="on-ranks", numbers=ranks), held, 2, 4)


def _is_sharded(regions: Mapping[int, Region], groups: Sequence[Sequence[int]]) -> bool:
    """Return whether ranks of a group hold different parts of a parameter."""
    return any(len({regions[rank].key for rank in group if rank in regions}) > 1 for group in groups)

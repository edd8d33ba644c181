"""Edits that give ranks other blocks of parameters: those of their coordinates along a mesh axis."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes, Joint
from moeverify.explain.program import SETUP, Program
from moeverify.explain.regroup import Groups
from moeverify.parallel.regions.region import Region

_MOST = 24

Starts = tuple[tuple[int, float], ...]
"""For each rank with a block, the rank and the start of its block, in blocks."""


@dataclass(frozen=True)
class _Blocks:
    """Blocks of one parameter along `dim`. `whole` is the single device's value of it."""

    name: str
    regions: Mapping[At, Region]
    dim: int
    whole: int

    @property
    def starts(self) -> Starts:
        """The starts of the blocks."""
        held = ((at[0], region.dims[self.dim]) for at, region in self.regions.items())
        return tuple((rank, index[0] / len(index)) for rank, index in held)

    @property
    def count(self) -> int:
        """Number of blocks; 0 for parts that are not contiguous, or not of one size that divides the dimension."""
        held = [region.dims[self.dim] for region in self.regions.values()]
        sizes = {len(index) for index in held}
        size = next(iter(self.regions.values())).shape[self.dim] if held else 0
        length = sizes.pop() if len(sizes) == 1 else 0
        is_regular = length > 0 and size % length == 0 and all(isinstance(index, range) for index in held)
        return size // length if is_regular and length < size else 0


def list_blocks(joint: Joint, one: Program, groups: Groups, *, of_axes: bool) -> Iterator[Edit]:
    """Yield edits that give ranks the blocks of parameters that their coordinates along a mesh axis choose.

    An edit changes all parameters with the same blocks, or those of them with one name in all layers. With
    `of_axes`, another axis chooses the blocks now, as may be right, or else no axis does.
    """
    alike: dict[tuple[int, Starts], list[_Blocks]] = defaultdict(list)
    for each in _list_held(joint, one):
        alike[each.count, each.starts].append(each)
    found = (
        _make(joint, one, members, chosen, (mine, axis))
        for (count, starts), parameters in alike.items()
        if bool(mine := _find_axis(groups, count, starts)) == of_axes
        for axis in groups
        if (chosen := _list_others(groups, axis, count, starts))
        for members in _divide(parameters)
    )
    yield from itertools.islice((edit for edit in found if edit is not None), _MOST)


def _find_axis(groups: Groups, count: int, starts: Starts) -> str:
    """Return the first mesh axis that chooses the blocks of ranks, or an empty string."""
    return next((axis for axis in groups if _list_coordinates(groups, axis, count) == dict(starts)), "")


def _list_others(groups: Groups, axis: str, count: int, starts: Starts) -> dict[int, int]:
    """Return the blocks that a mesh axis chooses for the ranks that have others."""
    right = _list_coordinates(groups, axis, count)
    return {rank: right[rank] for rank, start in starts if right.get(rank, start) != start}


def _list_held(joint: Joint, one: Program) -> Iterator[_Blocks]:
    """Yield the dimensions of parameters and buffers of which ranks have blocks before the first step."""
    for mark, shown in one.marks.items():
        value = shown[-1].value
        if mark[0] != SETUP or value is None:
            continue
        parts = (
            (rank, part) for rank, each in enumerate(joint.programs) for part in each.marks.get(mark, ())
        )
        regions = {
            (rank, part.value): part.region
            for rank, part in parts
            if part.value is not None and part.region.flat is None
        }
        shape = tuple(one.values[value].shape)
        if any(region.shape != shape for region in regions.values()):
            continue  # such as a parameter that one device keeps flat
        for dim, _ in enumerate(shape):
            found = _Blocks(mark[2], regions, dim, value)
            if found.count:
                yield found


def _divide(parameters: Sequence[_Blocks]) -> Iterator[Sequence[_Blocks]]:
    """Yield all parameters, then those with one name in all layers."""
    yield parameters
    named: dict[str, list[_Blocks]] = defaultdict(list)
    for each in parameters:
        named[re.sub(r"\d+", "", each.name)].append(each)
    if len(named) > 1:
        yield from named.values()


def _make(
    joint: Joint,
    one: Program,
    parameters: Sequence[_Blocks],
    chosen: Mapping[int, int],
    axes: tuple[str, str],
) -> Edit | None:
    """Return the edit that gives ranks the `chosen` blocks; None if their values were not recorded."""
    changes, ops, shown = Changes(), dict[At, None](), [axes]
    for each in parameters:
        whole = one.values[each.whole].data
        for at, region in each.regions.items():
            data = joint.data(at)
            if at[0] not in chosen or whole is None or data is None:
                continue
            length, first = len(region.dims[each.dim]), chosen[at[0]]
            index = range(first * length, (first + 1) * length)
            other = replace(region, dims=(*region.dims[: each.dim], index, *region.dims[each.dim + 1 :]))
            block = other.take(whole.reshape(region.shape))
            changes.values[at] = block.reshape(data.shape).to(data.dtype)
            ops[joint.maker(at)] = None
            shown.append((_name(region, each.dim), _name(other, each.dim)))
    names = tuple(dict.fromkeys(each.name for each in parameters))
    return Edit("block", tuple(ops), changes, numbers=tuple(shown[:2]), place=names) if ops else None


def _list_coordinates(groups: Groups, axis: str, count: int) -> dict[int, int]:
    """Return the coordinates of ranks along a mesh axis of this size; empty for another size."""
    return {rank: ranks.index(rank) for ranks in groups[axis] if len(ranks) == count for rank in ranks}


def _name(region: Region, dim: int) -> str:
    index = region.dims[dim]
    return f"[{index[0]}:{index[-1] + 1}] of dim {dim}"

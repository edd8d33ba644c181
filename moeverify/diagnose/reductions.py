"""What ranks bring to a collective that adds up tensors, beside what comes out and what should.

A tensor that was all-reduced last shows how: some function of what the ranks brought is what they have. Where the
same function of what other ranks brought is the golden, or another function of the same, the collective itself is
wrong, and both equations hold to rounding by no chance. No part of the golden has to be known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moeverify.diagnose.axes import Groups
from moeverify.results.trace import CollectiveRecord

Combination = Literal["sum", "max", "min", "product", "copy"]

_COMBINE: Mapping[Combination, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(dim=0),
    "max": lambda stacked: stacked.amax(dim=0),
    "min": lambda stacked: stacked.amin(dim=0),
    "product": lambda stacked: stacked.prod(dim=0),
}


@dataclass(frozen=True)
class Brought:
    """What a rank brought to one all-reduce. Shape: (elements)."""

    collective: CollectiveRecord
    values: Tensor


class Bringing:
    """Keeps what this rank brings to all-reduces and broadcasts of some sizes while it is open.

    `brought` has their numbers and values, `limit` bounds the elements that are kept.
    """

    def __init__(self, sizes: Collection[int], limit: int) -> None:
        self.is_open = False
        self.brought: list[tuple[int, Tensor]] = []
        self._sizes = frozenset(sizes)
        self._room = limit

    def keep(self, number: int, tensor: Tensor) -> None:
        """Keep what is brought to the collective of a number; see `CollectiveTrace.on_all_reduce`."""
        if self.is_open and tensor.numel() in self._sizes and tensor.numel() <= self._room:
            self._room -= tensor.numel()
            self.brought.append((number, tensor.detach().to("cpu", copy=True).reshape(-1)))


@dataclass(frozen=True)
class Meeting:
    """One all-reduce of each rank that issued its like: by rank, its record and what it brought.

    Ranks of one group met each other; all groups did the same for the parts of one tensor.
    """

    collectives: Mapping[int, CollectiveRecord]
    values: Mapping[int, Tensor]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups that met."""
        return tuple(dict.fromkeys(each.group for each in self.collectives.values()))

    @property
    def site(self) -> str:
        """Return where the first rank issued it."""
        return self.collectives[min(self.collectives)].site


@dataclass(frozen=True)
class ReadReduction:
    """What a meeting says of a wrong tensor.

    Ranks have `combination` of what their `met` groups brought; the expected values are the sum over the groups of
    `axes`. No axes: what each rank brought is what is expected, and it was added up once more.
    """

    meeting: Meeting
    combination: Combination
    axes: tuple[str, ...]
    residual: float


def list_meetings(brought: Mapping[int, Sequence[Brought]], sizes: Mapping[int, int]) -> list[Meeting]:
    """Return what ranks brought to all-reduces as large as their part of a tensor, the last ones first.

    `sizes` has the elements of that part by rank; what others brought to the same collectives is there too. The
    n-th from the end of such collectives from one place in the source belongs to the n-th from the end of the others:
    so many tensors may have one shape.
    """
    found: dict[tuple[str, int], dict[int, Brought]] = {}
    for rank, size in sizes.items():
        counts: dict[str, int] = {}
        for each in reversed(brought.get(rank, ())):
            if each.values.numel() != size or len(each.collective.group) < 2:
                continue
            site = each.collective.site
            number = counts[site] = counts.get(site, -1) + 1
            found.setdefault((site, number), {})[rank] = each
    return [
        Meeting(
            {rank: each.collective for rank, each in members.items()},
            {
                rank: each.values.reshape(-1).to(torch.float64)
                for rank, each in (_find_others(brought, members) | members).items()
            },
        )
        for _, members in sorted(found.items(), key=lambda item: item[0][1])
        if set(members) == set(sizes)
    ]


def _find_others(
    brought: Mapping[int, Sequence[Brought]], members: Mapping[int, Brought]
) -> dict[int, Brought]:
    """Return what ranks without the tensor brought to the same collectives: those met in them by mistake.

    Collectives of a group are numbered alike on its ranks.
    """
    met = {_number(each) for each in members.values()}
    return {rank: each for rank, kept in brought.items() for each in kept if _number(each) in met}


def _number(brought: Brought) -> tuple[object, ...]:
    """Return what is equal for what ranks bring to one collective."""
    record = brought.collective
    return record.group, record.axis, record.sequence, brought.values.numel()


def read_meeting(
    meeting: Meeting,
    actual: Mapping[int, Tensor],
    expected: Mapping[int, Tensor],
    groups: Groups,
    exact: float,
) -> ReadReduction | None:
    """Return how a meeting made a wrong tensor and what would have made the right one; None where it does not tell.

    `actual` and `expected` are by rank what it has and what it should have, flattened; the same factor (a divisor, a
    scale of the loss) stands before both.
    """
    for combination in _list_combinations(meeting):
        factor = _find_factor(meeting, actual, combination, exact)
        if factor is None:
            continue
        own = {rank: factor * values for rank, values in meeting.values.items()}
        if _agree(own, expected, exact) is not None:
            return ReadReduction(meeting, combination, (), _agree(own, expected, exact) or 0.0)
        right: dict[str, float] = {}
        for axis, members in groups.items():
            residual = _measure_sum(meeting, members, factor, expected, exact)
            if residual is not None and not (combination == "sum" and _is_met(meeting, members)):
                right[axis] = residual
        if right:
            first = next(iter(right))
            alike = tuple(axis for axis in right if _as_sets(groups[axis]) == _as_sets(groups[first]))
            return ReadReduction(meeting, combination, alike, right[first])
    return None


def _find_factor(
    meeting: Meeting, actual: Mapping[int, Tensor], combination: Combination, exact: float
) -> float | None:
    """Return the one factor with which the combination over what met is what all ranks have."""
    combined = {
        rank: _combine(combination, record, meeting)
        for rank, record in meeting.collectives.items()
        if all(other in meeting.values for other in record.group)
        and len({meeting.values[other].numel() for other in record.group}) == 1
    }
    if set(combined) != set(actual):
        return None
    squares = sum(float(values.square().sum()) for values in combined.values())
    if not squares or not math.isfinite(squares):
        return None
    factor = sum(float((combined[rank] * actual[rank]).sum()) for rank in actual) / squares
    scaled = {rank: factor * values for rank, values in combined.items()}
    return factor if factor and _agree(scaled, actual, exact) is not None else None


def _list_combinations(meeting: Meeting) -> tuple[Combination, ...]:
    is_copied = all(each.op == "broadcast" for each in meeting.collectives.values())
    return ("copy",) if is_copied else tuple(_COMBINE)


def _combine(combination: Combination, record: CollectiveRecord, meeting: Meeting) -> Tensor:
    """Return what a rank has after a collective. Shape: (elements)."""
    if combination == "copy":
        return meeting.values[record.group[record.peer]]
    return _COMBINE[combination](torch.stack([meeting.values[other] for other in record.group]))


def _measure_sum(
    meeting: Meeting,
    members: Sequence[Sequence[int]],
    factor: float,
    expected: Mapping[int, Tensor],
    exact: float,
) -> float | None:
    """Return what is left where the sums over other groups are the expected values; None where they are not."""
    sums: dict[int, Tensor] = {}
    for group in members:
        own = [rank for rank in group if rank in expected]
        if own and len({expected[rank].numel() for rank in own}) == 1:
            total = factor * torch.stack([meeting.values[rank] for rank in own]).sum(dim=0)
            sums |= dict.fromkeys(own, total)
    return _agree(sums, expected, exact) if set(sums) == set(expected) else None


def _agree(first: Mapping[int, Tensor], second: Mapping[int, Tensor], exact: float) -> float | None:
    """Return the largest relative difference over ranks, None where it is above rounding."""
    worst = 0.0
    for rank, wanted in second.items():
        norm = float(wanted.norm()) or float(first[rank].norm()) or 1.0
        left = float((first[rank] - wanted).norm()) / norm
        if not left <= exact:  # nor where it is not a number
            return None
        worst = max(worst, left)
    return worst


def _is_met(meeting: Meeting, members: Sequence[Sequence[int]]) -> bool:
    """Return whether these are the groups that met."""
    return _as_sets(meeting.groups) >= {
        tuple(group) for group in members if set(group) <= set(meeting.values)
    }


def _as_sets(groups: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(sorted(group)) for group in groups}

"""Replicas that hold addends: their sum over one axis is the golden, so a reduction over it is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.evidence import EXACT, Piece, Suspect
from moeverify.diagnose.verdict import Verdict, name_either
from moeverify.results.cause import Cause

Groups = Mapping[str, Sequence[Sequence[int]]]  # axis -> its groups of ranks


@dataclass(frozen=True)
class ReplicaSum:
    """What the sum of the replicas over one axis is: `factor` times the golden, or None and why not.

    `residual` is what is left of the sum, None where there was nothing to add up.
    """

    axis: str
    size: int
    factor: float | None
    why: str = ""
    residual: float | None = None

    @property
    def explains(self) -> bool:
        """Return whether the replicas are addends, or addends of a mean."""
        wanted = (1.0, float(self.size), 1.0 / self.size)
        return self.factor is not None and any(abs(self.factor - each) < 1e-6 * each for each in wanted)


def sum_replicas(suspect: Suspect, groups: Groups) -> list[ReplicaSum]:
    """Return what the sum over each axis is."""
    return [_sum_over_axis(suspect, axis, members) for axis, members in groups.items()]


def examine_replica_sums(suspect: Suspect, groups: Groups) -> Verdict | None:
    """Return a verdict if summing or averaging what replicas hold over one axis gives the golden.

    Every axis is tried; the first that explains it is named, axes of the data before those of the experts.
    Where it holds for several, the other layouts that could tell are asked for by `axes`.
    """
    sums = sum_replicas(suspect, groups)
    fitting = [each for each in sums if each.explains]
    if not fitting:
        return None
    first = fitting[0]
    axes = tuple(each.axis for each in fitting if _same_groups(groups[each.axis], groups[first.axis]))
    sentence = f"it is not reduced over {name_either(axes)}: its {first.size} replicas add up to the golden"
    tried = [f"sum over {each.axis} = {each.factor:.6g} * golden" for each in fitting]
    return Verdict(Cause.MISSING_REDUCTION, sentence, f"axis {', '.join(axes)}", tuple(tried), axes)


def _same_groups(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> bool:
    return {tuple(group) for group in first} == {tuple(group) for group in second}


def _sum_over_axis(suspect: Suspect, axis: str, groups: Sequence[Sequence[int]]) -> ReplicaSum:
    """Return k if, for every region and group, the sum of the replicas is k times the golden."""
    size = max(map(len, groups))
    replicas = list(_find_replicas(suspect, groups))
    if not replicas or min(map(len, replicas)) < 2:
        why = f"the ranks of one {axis} group hold different parts" if replicas else "no rank holds any of it"
        return ReplicaSum(axis, size, None, why)
    if not any(map(_differ, replicas)):
        return ReplicaSum(axis, size, None, "the replicas are equal, so none is an addend")
    measured = [_factor(members, suspect.expected) for members in replicas]
    factors = [factor for factor, _ in measured if factor is not None]
    if len(factors) < len(measured):
        return ReplicaSum(axis, size, None, "the golden is zero in a part")
    worst = max(residual for _, residual in measured)
    if not all(residual < EXACT for _, residual in measured):  # also where it is not a number
        return ReplicaSum(axis, size, None, "the sum is no multiple of the golden", worst)
    if max(factors) - min(factors) > 1e-6 * abs(max(factors)):
        return ReplicaSum(axis, size, None, "the sums of the parts are different multiples of it", worst)
    return ReplicaSum(axis, size, factors[0], "", worst)


def _find_replicas(suspect: Suspect, groups: Sequence[Sequence[int]]) -> Iterator[list[Piece]]:
    """Yield, for each region, what each group of ranks that holds it has."""
    for pieces in suspect.by_region().values():
        held = {piece.rank: piece for piece in pieces}
        for group in groups:
            members = [held[rank] for rank in group if rank in held]
            if members:
                yield members


def _differ(members: Sequence[Piece]) -> bool:
    first = _value(members[0])
    return any(not torch.equal(first, _value(piece)) for piece in members[1:])


def _factor(members: Sequence[Piece], expected: Tensor) -> tuple[float | None, float]:
    """Return (k, what is left) of the sum as k times the golden; no k where the golden is zero."""
    total = torch.stack([_value(piece) for piece in members]).sum(dim=0)
    wanted = members[0].region.take(expected).reshape(total.shape)
    square = float(torch.sum(wanted * wanted))
    if square == 0.0:
        return None, 0.0
    factor = float(torch.sum(total * wanted)) / square
    return factor, float((total - factor * wanted).norm()) / float(total.norm() or 1.0)


def _value(piece: Piece) -> Tensor:
    if piece.local is None:
        return torch.zeros(piece.region.local_shape, dtype=torch.float64)
    return piece.local.to(torch.float64)

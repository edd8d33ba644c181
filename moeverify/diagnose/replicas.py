"""Replicas that hold addends: their sum over one axis is the golden, so a reduction over it is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moeverify.diagnose.cause import Cause
from moeverify.diagnose.evidence import EXACT, Piece, Suspect
from moeverify.diagnose.verdict import Verdict

Groups = Mapping[str, Sequence[Sequence[int]]]  # axis -> its groups of ranks


def examine_replica_sums(suspect: Suspect, groups: Groups) -> Verdict | None:
    """Return a verdict if summing or averaging what replicas hold over one axis gives the golden.

    Every axis is tried; the first that explains it is named, axes of the data before those of the experts.
    """
    tried: list[str] = []
    for axis, members in groups.items():
        factor = _sum_over_axis(suspect, members)
        if factor is None:
            continue
        size = max(map(len, members))
        tried.append(f"sum over {axis} = {factor:.6g} * golden")
        if any(abs(factor - wanted) < 1e-6 * wanted for wanted in (1.0, float(size), 1.0 / size)):
            sentence = f"it is not reduced over {axis}: its {size} replicas add up to the golden"
            return Verdict(Cause.MISSING_REDUCTION, sentence, f"axis {axis}", tuple(tried))
    return None


def _sum_over_axis(suspect: Suspect, groups: Sequence[Sequence[int]]) -> float | None:
    """Return k if, for every region and group, the sum of the replicas is k times the golden; else None."""
    factors: list[float] = []
    differs = False
    for pieces in suspect.by_region().values():
        held = {piece.rank: piece for piece in pieces}
        for group in groups:
            members = [held[rank] for rank in group if rank in held]
            if not members:
                continue  # this group holds another region
            if len(members) < 2:
                return None
            differs |= _differ(members)
            factor = _factor(members, suspect.expected)
            if factor is None:
                return None
            factors.append(factor)
    if not differs or not factors or max(factors) - min(factors) > 1e-6 * abs(max(factors)):
        return None
    return factors[0]


def _differ(members: Sequence[Piece]) -> bool:
    first = _value(members[0])
    return any(not torch.equal(first, _value(piece)) for piece in members[1:])


def _factor(members: Sequence[Piece], expected: Tensor) -> float | None:
    total = torch.stack([_value(piece) for piece in members]).sum(dim=0)
    wanted = members[0].region.take(expected).reshape(total.shape)
    square = float(torch.sum(wanted * wanted))
    if square == 0.0:
        return None
    factor = float(torch.sum(total * wanted)) / square
    error = float((total - factor * wanted).norm()) / float(total.norm() or 1.0)
    return factor if error < EXACT else None


def _value(piece: Piece) -> Tensor:
    if piece.local is None:
        return torch.zeros(piece.region.local_shape, dtype=torch.float64)
    return piece.local.to(torch.float64)

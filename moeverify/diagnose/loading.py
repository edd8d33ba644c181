"""Names why a loaded tensor is not the one that was saved: kept as it was, moved, exchanged, of another time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.evidence import Piece, Suspect
from moeverify.diagnose.permutation import examine_places
from moeverify.diagnose.state import find_scale
from moeverify.diagnose.verdict import Verdict, list_ranks
from moeverify.layout.region import Region
from moeverify.results.cause import Cause

_SAME = 1e-9
_MOST_SHIFT = 4096
UNKNOWN = "it holds other values than were saved, and none that are known"

Read = Callable[[str], Tensor | None]


@dataclass(frozen=True)
class LoadedPiece:
    """What one rank has of a tensor after the load, and what it had before."""

    rank: int
    region: Region
    local: Tensor
    before: Tensor


@dataclass(frozen=True)
class Saved:
    """Where the right values are: `read` gives a whole tensor that was saved, `earlier` the one of a step before.

    `by_shape` has the names of all saved tensors of a shape, `wrong` those that were loaded wrong.
    """

    read: Read
    earlier: Read
    by_shape: Mapping[tuple[int, ...], Sequence[str]]
    wrong: Collection[str]


def name_loaded(name: str, expected: Tensor, pieces: Sequence[LoadedPiece], saved: Saved) -> Verdict:
    """Return the cause of a tensor that is another one than was saved; `expected` is the whole one."""
    suspect = Suspect((0, "loaded", name), expected.to(torch.float64))
    suspect.pieces.extend(Piece(piece.rank, piece.region, piece.local) for piece in pieces)
    return (
        _examine_before(expected, pieces)
        or examine_places(suspect)
        or _examine_shift(suspect)
        or _examine_others(suspect, saved)
        or _examine_time(suspect, saved)
        or _examine_scale(suspect)
        or _name_unknown(suspect)
    )


def _name_unknown(suspect: Suspect) -> Verdict:
    actual = suspect.whole()
    if actual.numel() == 1:
        sentence = f"it is {float(actual):.10g}, and {float(suspect.expected):.10g} was saved"
        return Verdict(Cause.STATE, sentence)
    return Verdict(Cause.STATE, UNKNOWN)


def _examine_before(expected: Tensor, pieces: Sequence[LoadedPiece]) -> Verdict | None:
    """Return a verdict if all that is wrong is what it was before the load."""
    num_kept = num_wrong = num_held = 0
    ranks = []
    for piece in pieces:
        wanted = piece.region.take(expected).reshape(piece.region.local_shape)
        local, before = (part.reshape(piece.region.local_shape) for part in (piece.local, piece.before))
        wrong = local != wanted
        num_wrong += int(wrong.sum())
        num_kept += int((wrong & (local == before)).sum())
        num_held += local.numel()
        if wrong.any():
            ranks.append(piece.rank)
    if not num_wrong or num_kept < num_wrong:
        return None
    sentence = f"it was not loaded on {list_ranks(ranks)}: it has the value that it had before the load"
    return Verdict(
        Cause.NOT_LOADED, sentence, list_ranks(ranks), (f"{num_kept} of {num_held} elements were kept",)
    )


def _examine_shift(suspect: Suspect) -> Verdict | None:
    """Return a verdict if what a rank holds begins too far along or too early, as after a wrong offset."""
    for piece in suspect.pieces:
        if piece.local is None:
            continue
        wanted = piece.region.take(suspect.expected).reshape(-1)
        local = piece.local.to(torch.float64).reshape(-1)
        size = local.numel()
        if torch.equal(wanted, local):
            continue
        for shift in range(1, min(_MOST_SHIFT, size - 1)):
            rest = size - shift
            for what, expected, actual in (
                ("too far along", wanted[shift:], local[:rest]),
                ("too early", wanted[:rest], local[shift:]),
            ):
                if torch.equal(expected, actual) and bool(actual.any()):
                    sentence = f"the right values in wrong places: read {shift} elements {what}"
                    return Verdict(Cause.PERMUTATION, sentence, f"rank {piece.rank}")
    return None


def _examine_others(suspect: Suspect, saved: Saved) -> Verdict | None:
    """Return a verdict if it is another tensor that was saved, or parts of one."""
    actual = suspect.whole()
    for other in saved.by_shape.get(tuple(suspect.expected.shape), ()):
        if other == suspect.name or actual.numel() < 2 or not bool(actual.any()):
            continue
        values = saved.read(other)
        if values is not None and torch.equal(values.to(torch.float64), actual):
            if other in saved.wrong:
                return Verdict(Cause.PERMUTATION, f"it holds the values of {other}, which has others", other)
            return Verdict(Cause.DUPLICATE, f"it is a copy of {other}", other)
    return None


def _examine_time(suspect: Suspect, saved: Saved) -> Verdict | None:
    earlier = saved.earlier(suspect.name)
    if earlier is None or earlier.shape != suspect.expected.shape:
        return None
    actual = suspect.whole()
    distance = float((actual - earlier.to(torch.float64)).norm())
    if distance <= _SAME * float(actual.norm()) and bool(actual.any()):
        return Verdict(Cause.STALE, "it holds the values of the step before the one that was saved")
    return None


def _examine_scale(suspect: Suspect) -> Verdict | None:
    factor = find_scale(suspect) if suspect.expected.numel() > 1 else None
    if factor is None:
        return None
    if abs(factor) < _SAME:
        return Verdict(Cause.DETACHED, "it is zero")
    return Verdict(Cause.SCALE, f"it is {factor:.6g} times what was saved")

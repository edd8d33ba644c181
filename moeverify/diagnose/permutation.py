"""Right values in wrong places: permuted, shifted, or copied from another part of the same tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.diagnose.evidence import EXACT, Suspect
from moeverify.diagnose.verdict import Verdict
from moeverify.results.cause import Cause

_MOST_ROWS = 4096


def examine_places(suspect: Suspect) -> Verdict | None:
    """Return a verdict if the slices of the tensor along some dim are slices of the golden, in other places."""
    actual = suspect.whole()
    for dim in range(actual.ndim):
        source = match_slices(suspect.expected, actual, dim)
        if source is None:
            continue
        moved = [(to, origin) for to, origin in enumerate(source) if to != origin]
        if not moved:
            continue
        evidence = (f"dim {dim}: " + _describe(moved),)
        if len(set(source)) == len(source):
            sentence = f"the values are right but permuted along dim {dim}: {_describe(moved)}"
            return Verdict(Cause.PERMUTATION, sentence, f"dim {dim}", evidence)
        sentence = f"parts along dim {dim} hold copies of other parts: {_describe(moved)}"
        return Verdict(Cause.DUPLICATE, sentence, f"dim {dim}", evidence)
    if (
        actual.numel() > 8
        and not torch.equal(actual, suspect.expected)
        and _same_values(suspect.expected, actual)
    ):
        return Verdict(
            Cause.PERMUTATION, "it holds exactly the golden's values, in another order", "order of elements"
        )
    return None


def _same_values(expected: Tensor, actual: Tensor) -> bool:
    return bool(torch.equal(expected.reshape(-1).sort().values, actual.reshape(-1).sort().values))


def match_slices(expected: Tensor, actual: Tensor, dim: int) -> list[int] | None:
    """Return, for each slice of `actual` along a dim, the index of the equal slice of `expected`.

    None where some slice has no equal one, or where slices are too small or too many to say.
    """
    measured = _measure_slices(expected, actual, dim)
    if measured is None:
        return None
    distance, norms = measured
    best = distance.argmin(dim=1)
    if not bool((distance.amin(dim=1) <= EXACT * norms).all()):
        return None
    # A slice that stands where it belongs is taken as such, even where another one equals it.
    own = distance.diagonal() <= EXACT * norms
    return [int(index) for index in torch.where(own, torch.arange(len(best)), best)]


def count_matches(expected: Tensor, actual: Tensor, dim: int) -> int | None:
    """Return how many slices of `actual` along a dim equal some slice of `expected`; None as above."""
    measured = _measure_slices(expected, actual, dim)
    if measured is None:
        return None
    distance, norms = measured
    return int((distance.amin(dim=1) <= EXACT * norms).sum())


def _measure_slices(expected: Tensor, actual: Tensor, dim: int) -> tuple[Tensor, Tensor] | None:
    """Return the distance of each slice of `actual` from each of `expected`, and the norms of the former."""
    size = actual.shape[dim]
    if not 2 <= size <= _MOST_ROWS or actual.numel() // size < 2:
        return None
    wanted = expected.movedim(dim, 0).reshape(size, -1)
    found = actual.movedim(dim, 0).reshape(size, -1)
    distance = torch.cdist(found, wanted, compute_mode="donot_use_mm_for_euclid_dist")
    return distance, found.norm(dim=1).clamp(min=1e-300)


def _describe(moved: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{to} holds {origin}" for to, origin in moved[:4])
    return shown + (f", and {len(moved) - 4} more" if len(moved) > 4 else "")

"""Search for the slices of a tensor among the slices of its golden: right values in wrong places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.explain.fitting.families import name_family
from moeverify.explain.fitting.wrong_tensor import EXACT
from moeverify.results.part import Block

MOST_SLICES = 4096
"""Distances between all pairs of this many slices take 128 MiB in float64."""


def make_block(name: str, dim: int, indices: Sequence[int]) -> Block:
    """Return slices of a tensor as a block, with the unit of the dim: experts, rows or columns."""
    units = {0: name_family([name]) or "row", 1: "column"}
    return Block(dim=dim, indices=tuple(indices), unit=units.get(dim, "index"))


def match_slices(
    expected: Tensor, actual: Tensor, dim: int, *, allowed: Tensor | None = None
) -> list[int] | None:
    """Return, for each slice of `actual` along a dim, the index of the equal slice of `expected`.

    Slices are equal if their distance is at most `allowed` (slices,), by default `EXACT` times the norm.
    Return None if some slice has no equal one, or if slices are too small or too many. Also return None if
    each moved slice is constant, such as zeros: lost values are zero, and not copies of other zeros.
    """
    measured = _measure_slices(expected, actual, dim)
    if measured is None:
        return None
    distance, norms = measured
    allowed = EXACT * norms if allowed is None else allowed
    best = distance.argmin(dim=1)
    if not bool((distance.amin(dim=1) <= allowed).all()):
        return None
    # A slice in its right place counts as such, even if another slice is equal.
    own = distance.diagonal() <= allowed
    moved = actual.movedim(dim, 0).reshape(len(best), -1)[~own]
    if len(moved) and bool((moved == moved[:, :1]).all()):
        return None
    return [int(index) for index in torch.where(own, torch.arange(len(best)), best)]


def has_same_values(expected: Tensor, actual: Tensor) -> bool:
    """Return whether both tensors hold exactly the same values, in any order."""
    return bool(torch.equal(expected.reshape(-1).sort().values, actual.reshape(-1).sort().values))


def _measure_slices(expected: Tensor, actual: Tensor, dim: int) -> tuple[Tensor, Tensor] | None:
    """Return the distances between slices of `actual` and `expected`, and the norms of the former.

    Shapes: (slices of actual, slices of expected) and (slices of actual,).
    """
    size = actual.shape[dim]
    if not 2 <= size <= MOST_SLICES or actual.numel() // size < 2:
        return None
    wanted = expected.movedim(dim, 0).reshape(size, -1)
    found = actual.movedim(dim, 0).reshape(size, -1)
    return measure_distances(found, wanted), found.norm(dim=1).clamp(min=1e-300)


def measure_distances(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the distance (N, M) of each row of `found` (N, D) from each row of `wanted` (M, D)."""
    # Without matrix products: |a|^2 - 2ab + |b|^2 loses half of the digits for nearly equal rows.
    return torch.cdist(found, wanted, compute_mode="donot_use_mm_for_euclid_dist")


def scale_rows(rows: Tensor) -> Tensor:
    """Return the scale (N,) for errors of rows (N, D): the larger of each norm and the median norm."""
    norms = rows.norm(dim=1)
    return torch.maximum(norms, norms.median()).clamp(min=1e-300)

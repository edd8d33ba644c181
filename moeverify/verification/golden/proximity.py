"""Distance between two fingerprints. No torch, because the controller of a run computes it."""

from __future__ import annotations

import math
from collections.abc import Mapping

Fingerprint = list[float] | str
"""[norm, projection, projection] of a floating point tensor, [value] of a number, or a hash."""


def distance(expected: Fingerprint, actual: Fingerprint) -> float:
    """Return the distance between two fingerprints, relative to the expected norm.

    It is infinite for fingerprints of different kinds and for NaN. If the expected norm is zero, it is
    absolute.
    """
    if isinstance(expected, str) or isinstance(actual, str):
        return 0.0 if expected == actual else float("inf")
    if len(expected) != len(actual):
        return float("inf")
    scale = abs(expected[0]) or 1.0
    apart = [abs(e - a) / scale for e, a in zip(expected, actual, strict=True)]
    return max(apart, default=0.0) if all(map(math.isfinite, apart)) else float("inf")


def worst_distance(
    expected: Mapping[str, Fingerprint], actual: Mapping[str, Fingerprint]
) -> tuple[str, float]:
    """Return the name with the largest distance, and the distance.

    A name that only one side has is infinitely far. Without names, returns ("", 0.0).
    """
    names = sorted(expected.keys() | actual.keys())
    far = {
        name: distance(expected[name], actual[name]) if name in expected and name in actual else float("inf")
        for name in names
    }
    worst = max(names, key=far.__getitem__, default="")
    return worst, far.get(worst, 0.0)

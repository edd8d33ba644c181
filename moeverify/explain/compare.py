"""Comparison of tensors up to float64 rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

TOLERANCE = 1e-8
ROUNDING = 1e-6
"""Maximum relative error of values that were rounded to float32."""


def is_right(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Return whether a tensor has the expected values up to float64 rounding; shapes may differ."""
    if actual.numel() != expected.numel():
        return False
    return relative_error(actual, expected) <= tolerance


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return norm(actual - expected) / norm(expected); shapes may differ."""
    one, two = actual.reshape(-1).to(torch.float64), expected.reshape(-1).to(torch.float64)
    if torch.equal(one, two):
        return 0.0
    size = float(two.norm())
    error = float((one - two).norm())
    return error / size if size else math.inf


def is_rounding(made: Tensor, taken: Iterable[Tensor | None]) -> bool:
    """Return whether a tensor has other numbers than the ones of a wider dtype from which it was cast."""
    floating = (each for each in taken if each is not None and each.is_floating_point())
    wider = (each for each in floating if each.itemsize > made.itemsize)
    return any(not torch.equal(each, made.to(each.dtype)) for each in wider)

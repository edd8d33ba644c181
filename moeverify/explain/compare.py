"""Comparison of tensors up to float64 rounding."""

from __future__ import annotations

import math

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

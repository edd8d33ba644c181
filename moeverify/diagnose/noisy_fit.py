"""A factor between two tensors that were both computed in 16 bits, and its standard error.

Below float32 no fit leaves a thousandth of an error, so a factor is judged by what rounding would leave. Rounding
moves each number by itself, up and down, so the factor of every row and of every column alone agrees with that of the
whole within its own standard error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

LEAST_NUMBERS = 16  # fewer show no picture
_MOST_UNITS = (
    8.0  # of rounding, that may be left of a tensor: what `hypotheses.rounding` takes for rounding at most
)
_LEAST_SPREAD = (
    0.125  # of a unit: rounding of what all gradients are made of, such as logits, moves all alike
)
_STANDARD_ERRORS = (
    4.0  # by which two factors that are the same may be apart: 1 in 16000 of normal errors is further
)
_LEAST_SLICES = 4


@dataclass(frozen=True)
class NoisyFactor:
    """How many times one tensor the other is: `value`, with the standard error `spread` of it."""

    value: float
    spread: float

    def agrees(self, value: float) -> bool:
        """Return whether it may be this number."""
        return abs(self.value - value) <= _STANDARD_ERRORS * self.spread


def fit_noisy(actual: Tensor, expected: Tensor, unit: float) -> NoisyFactor | None:
    """Return the factor of two tensors with noise of the same relative size; None where it shows nothing.

    Shapes: both have the same one.

    Least squares takes the noise of `expected` for nothing and comes out low by its square. The quotient of the norms
    does not, since both tensors have that noise.
    """
    held = expected.reshape(-1) != 0.0
    first, second = float(actual.norm()), float(expected.norm())
    if int(held.sum()) < LEAST_NUMBERS or not 0.0 < first < float("inf") or not second:
        return None
    value = first / second * (-1.0 if float((actual * expected).sum()) < 0.0 else 1.0)
    left = actual - value * expected
    scatter = max(_measure_scatter(left, expected), default=1.0)
    # Errors of numbers are as large as they are, each by itself: the standard error of White (1980). Factors of
    # slices that differ by more than their own say that it is larger.
    spread = float((left * expected).norm()) / second**2 * max(scatter, 1.0) ** 0.5
    return NoisyFactor(value=value, spread=max(spread, _LEAST_SPREAD * unit * abs(value)))


def _measure_scatter(left: Tensor, expected: Tensor) -> Iterator[float]:
    """Yield, for each dim, the mean square of what a factor of each slice leaves of the residual, standardized."""
    for dim in range(expected.ndim):
        own, wanted = (each.movedim(dim, 0).reshape(each.shape[dim], -1) for each in (left, expected))
        if min(own.shape) < _LEAST_SLICES:
            continue
        errors = (own * wanted).square().sum(dim=1)
        known = (wanted != 0.0).sum(dim=1) >= _LEAST_SLICES
        known &= errors > 0.0
        if int(known.sum()) < _LEAST_SLICES:
            continue
        moved = (own * wanted).sum(dim=1).square()
        yield float((moved[known] / errors[known]).mean())


def is_left_by_rounding(actual: Tensor, expected: Tensor, unit: float) -> bool:
    """Return whether two tensors are as far apart as rounding makes them at most."""
    return float((actual - expected).norm()) <= _MOST_UNITS * unit * float(expected.norm())

"""A factor between two tensors that were both computed in 16 bits, its standard error, and a test of what is left.

Below float32 no fit leaves a thousandth of an error, so a factor is judged by what rounding would leave: a residual
with nothing in it. Rounding moves each number by itself, up and down, so the factor of every row and of every column
alone agrees with that of the whole within its own standard error. A bug that touches a part of the numbers, or adds
something that is no multiple, leaves rows or columns with factors of their own, or a residual larger than rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
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
_MOST_SCATTER = (
    6.0  # partial sums that are rounded before they meet had 5 in simulations, and independent errors 1
)
_LESS_THAN_ONE = (
    0.5  # of a unit: that little is left by less than one rounding of each number, and has no picture
)
_LEAST_SLICES = 4
_SHARPEST = 0.0025  # the largest standard error, as a share, with which a factor tells 2 from 1.97
_NEAREST = 0.25  # of the distance of a factor from 1 may be noise, a share of the tensor's norm


@dataclass(frozen=True)
class NoisyFactor:
    """How many times one tensor the other is: `value`, with the standard error `spread` of it.

    `residual` is what the factor leaves, as a share of the tensor. `scatter` is the mean square of the factors of
    slices, each by its own standard error, along the dim where that is largest: about 1 for rounding.
    """

    value: float
    spread: float
    residual: float
    scatter: float

    def is_noise(self, unit: float) -> bool:
        """Return whether what is left looks like rounding; `unit` is the largest relative error of one."""
        if self.residual <= _LESS_THAN_ONE * unit:
            return True
        return self.residual <= _MOST_UNITS * unit and self.scatter <= _MOST_SCATTER

    @property
    def is_sharp(self) -> bool:
        """Return whether the factor is known well enough to be held against integers."""
        return self.spread <= _SHARPEST * abs(self.value)

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
    # Errors of numbers are as large as they are, each by itself: the standard error of White (1980).
    spread = float((left * expected).norm()) / second**2 * max(scatter, 1.0) ** 0.5
    return NoisyFactor(
        value=value,
        spread=max(spread, _LEAST_SPREAD * unit * abs(value)),
        residual=float(left.norm()) / first,
        scatter=scatter,
    )


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


def join_factors(factors: Sequence[NoisyFactor]) -> NoisyFactor | None:
    """Return the one factor of several tensors, by their standard errors; None where one of them has another."""
    weights = torch.tensor([each.spread**-2 for each in factors], dtype=torch.float64)
    values = torch.tensor([each.value for each in factors], dtype=torch.float64)
    value = float((weights * values).sum() / weights.sum())
    if not all(each.agrees(value) for each in factors):
        return None
    # Rounding that moves all tensors alike does not average out.
    spread = max(float(weights.sum()) ** -0.5, min(each.spread for each in factors) / 2.0)
    return NoisyFactor(
        value=value,
        spread=spread,
        residual=max(each.residual for each in factors),
        scatter=max(each.scatter for each in factors),
    )


def is_left_by_rounding(actual: Tensor, expected: Tensor, unit: float) -> bool:
    """Return whether two tensors are as far apart as rounding makes them at most."""
    return float((actual - expected).norm()) <= _MOST_UNITS * unit * float(expected.norm())


def is_far_from_one(factor: NoisyFactor) -> bool:
    """Return whether a factor changes much more than noise does."""
    return _NEAREST * abs(factor.value - 1.0) > factor.residual * abs(factor.value)

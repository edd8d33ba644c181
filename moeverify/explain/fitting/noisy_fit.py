"""Factor between two tensors that were both computed in 16 bits, with its standard error.

Below float32, no fit reduces an error to a thousandth, so a factor is compared with the effect of rounding.
Rounding moves each number independently, so the factors of single rows and columns agree with the factor of
the whole tensor within their standard errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

LEAST_NUMBERS = 16  # fewer are not meaningful
_MOST_UNITS = 8.0  # largest residual in units of rounding, as in `hypotheses.rounding`
_LEAST_SPREAD = 0.125  # units: rounding of a common input such as the logits moves all gradients alike
_STANDARD_ERRORS = 4.0  # largest distance of equal factors: 1 in 16000 normal errors is larger
_LEAST_SLICES = 4


@dataclass(frozen=True)
class NoisyFactor:
    """Factor of one tensor relative to another: `value` with the standard error `spread`."""

    value: float
    spread: float

    def agrees(self, value: float) -> bool:
        """Return whether the factor is equal to a number within its standard error."""
        return abs(self.value - value) <= _STANDARD_ERRORS * self.spread


def fit_noisy(actual: Tensor, expected: Tensor, unit: float) -> NoisyFactor | None:
    """Return the factor between two tensors of equal shape with equal relative noise, or None.

    Least squares ignores the noise of `expected` and underestimates the factor by its square. The quotient
    of the norms does not, because both tensors have this noise. Return None with too few elements that are
    not zero, or if a norm is zero or not finite.
    """
    held = expected.reshape(-1) != 0.0
    first, second = float(actual.norm()), float(expected.norm())
    if int(held.sum()) < LEAST_NUMBERS or not 0.0 < first < float("inf") or not second:
        return None
    value = first / second * (-1.0 if float((actual * expected).sum()) < 0.0 else 1.0)
    left = actual - value * expected
    scatter = max(_measure_scatter(left, expected), default=1.0)
    # Errors scale with the numbers, independently: use the standard error of White (1980). If the factors
    # of slices differ by more than their own standard errors, increase it.
    spread = float((left * expected).norm()) / second**2 * max(scatter, 1.0) ** 0.5
    return NoisyFactor(value=value, spread=max(spread, _LEAST_SPREAD * unit * abs(value)))


def _measure_scatter(left: Tensor, expected: Tensor) -> Iterator[float]:
    """Yield, for each dim, the mean squared standardized residual of the factors of its slices."""
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
    """Return whether two tensors are no farther apart than rounding explains."""
    return float((actual - expected).norm()) <= _MOST_UNITS * unit * float(expected.norm())

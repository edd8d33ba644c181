"""Bounds on the rounding of a recomputed optimizer step, and on its values after storage in a dtype."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.train.recomputation import Recomputed

OWN = 2.0**-52  # twice the rounding of float64: of each term and of the sum


@dataclass(frozen=True)
class Inexact:
    """A result before it is stored, with the sources of its rounding error.

    Shapes: all (N,), except scalars.

    - `start`: the result is added to this before it is stored; zero for a moment.
    - `expected`: the value added to `start`.
    - `rounded`, `options`: as in `Recomputed`.
    - `smallest`: the number of roundings to zero, for results below the smallest normal number; (N,) or a
      scalar.
    - `least`, `most`: the interval that rounding adds to a value multiplied before the step.
    """

    start: Tensor
    expected: Tensor
    rounded: Tensor
    options: Tensor | float
    smallest: Tensor | float
    least: Tensor
    most: Tensor

    @classmethod
    def join(cls, results: Sequence[Inexact]) -> Inexact:
        """Concatenate several results."""
        if len(results) == 1:
            return results[0]
        return cls(
            torch.cat([each.start for each in results]),
            torch.cat([each.expected for each in results]),
            torch.cat([each.rounded for each in results]),
            _join_numbers([(each.options, each.start) for each in results]),
            _join_numbers([(each.smallest, each.start) for each in results]),
            torch.cat([each.least for each in results]),
            torch.cat([each.most for each in results]),
        )


def _join_numbers(values: Sequence[tuple[Tensor | float, Tensor]]) -> Tensor | float:
    """Concatenate numbers, each expanded to the shape of its tensor; keep a common scalar."""
    first = values[0][0]
    if isinstance(first, float) and all(isinstance(each, float) and each == first for each, _ in values):
        return first
    return torch.cat(
        [torch.full_like(like, each) if isinstance(each, float) else each for each, like in values]
    )


@dataclass(frozen=True)
class DtypeRounding:
    """Rounding of a dtype: half a unit in the last place of 1, and the smallest normal number.

    Smaller values may be rounded to zero. `arithmetic` is the unit of the dtype in which kernels compute.
    `dtype` is the coarsest dtype; None if tensors have several.
    """

    unit: float
    smallest: float
    arithmetic: float
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, dtypes: Collection[torch.dtype]) -> DtypeRounding:
        """Return the rounding of the coarsest dtype."""
        infos = [torch.finfo(dtype) for dtype in dtypes]
        unit = 0.5 * max(info.eps for info in infos)
        # Kernels compute with 16-bit tensors in float32.
        arithmetic = min(unit, 0.5 * torch.finfo(torch.float32).eps)
        (dtype,) = dtypes if len(dtypes) == 1 else (None,)
        return cls(unit, max(info.tiny for info in infos), arithmetic, dtype)

    def bound(self, recomputed: Recomputed, start: Tensor, actual: Tensor) -> tuple[Tensor, Stored]:
        """Return the largest rounding error (N,) of each element of a result, and the storable values.

        Shapes: `start` (N,), the value to which the result is added before it is stored, zero for a moment;
        `actual` (N,).
        """
        return self.bound_joined(self.describe(recomputed, recomputed.expected, start), actual)

    def describe(self, recomputed: Recomputed, expected: Tensor, start: Tensor) -> Inexact:
        """Return the sources of a result's error. `expected` (N,) is its precomputed value."""
        least, most = self._shrink(recomputed, start)
        # Rounded twice: a product of two numbers that were rounded in size.
        rounded = recomputed.rounded + self.unit / (1.0 - 16.0 * self.unit) * recomputed.squared
        return Inexact(start, expected, rounded, recomputed.options, recomputed.smallest, least, most)

    def bound_joined(self, made: Inexact, actual: Tensor) -> tuple[Tensor, Stored]:
        """Return the same as `bound`, for one result or several joined ones."""
        result, wanted = made.start + actual, made.start + made.expected
        # Half the spacing of numbers at the result. frexp returns mantissas in [0.5, 1).
        mantissa, exponent = torch.frexp(result)
        last = self.unit * torch.where(result == 0.0, 0.0, torch.ldexp(torch.ones_like(result), exponent - 1))
        # Below a power of two, numbers are twice as dense.
        is_from_below = (mantissa.abs() == 0.5) & (wanted.abs() < result.abs())
        last = torch.where(is_from_below, 0.5 * last, last)
        # The float64 sums used for comparison are rounded as well. Including higher orders, n roundings
        # cause at most 1 / (1 - n * unit) times their sum; n is below 16.
        own = OWN * (made.rounded + result.abs())
        inner = self.unit / (1.0 - 16.0 * self.unit) * made.rounded
        inner = inner + self.arithmetic / (1.0 - 16.0 * self.arithmetic) * made.options
        inner = inner + own + made.smallest * self.smallest
        shrunk = torch.where(result > wanted, made.most, -made.least)
        return last + inner + shrunk, self._store(made.start, wanted, made.least - inner, made.most + inner)

    def _shrink(self, recomputed: Recomputed, start: Tensor) -> tuple[Tensor, Tensor]:
        """Return the interval (N,) that rounding adds to a value multiplied before the step."""
        least = most = torch.zeros_like(start)
        if recomputed.shrunk_by is None:
            return least, most
        if self.dtype is None or self.unit == self.arithmetic:
            rounded = 2.0 * self.unit / (1.0 - 16.0 * self.unit) * start.abs()
            return -rounded, rounded
        # Each kernel takes one of these paths, up to its arithmetic: rounding of the factor, the product
        # and the difference.
        right, own = recomputed.shrunk_by * start, 3.0 * self.arithmetic * start.abs()
        for factor in (recomputed.shrunk_by, float(torch.tensor(recomputed.shrunk_by, dtype=self.dtype))):
            product = factor * start
            for shrunk in (product, product.to(self.dtype).to(start.dtype)):
                least, most = torch.minimum(least, shrunk - right), torch.maximum(most, shrunk - right)
        return least - own, most + own

    def _store(self, start: Tensor, wanted: Tensor, least: Tensor, most: Tensor) -> Stored:
        """Return the values that may be stored for a result that is off by `least` to `most` (N,).

        Rounding preserves order, so the stored value lies between the rounded ends. If these are equal,
        only one value is right.
        """
        if self.dtype is None:
            return Stored(torch.full_like(wanted, torch.inf), wanted - start)
        sums = (wanted + least, wanted + most, wanted)
        low, high, middle = (each.to(self.dtype).to(wanted.dtype) for each in sums)
        return Stored(high - low, middle - start)


@dataclass(frozen=True)
class Stored:
    """For each element, the distance of two results that may both be stored, and the nearest one: (N,)."""

    spread: Tensor
    nearest: Tensor

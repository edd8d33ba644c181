"""How two tensors differ, as a few numbers that can be merged over pieces and ranks.

All sums are taken in float64. `measure` leaves them in one tensor on the device, so that a whole step can
be compared without waiting for the device once per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.hashing import GOLDEN_RATIO, mix

NUM_STATISTICS = 10
_CHUNK = 1 << 22  # elements converted to float64 at a time: bounds the memory that a comparison needs


@dataclass(frozen=True)
class Difference:
    """Statistics of `actual` against `expected` over some elements of one logical tensor.

    `position` is the row-major position, in the local piece, of the element that differs most; `expected_at`
    and `actual_at` are the two values there.
    """

    count: float
    sum_expected2: float
    sum_actual2: float
    sum_product: float
    sum_error2: float
    max_error: float
    position: float
    expected_at: float
    actual_at: float
    num_nonfinite: float

    @classmethod
    def from_statistics(cls, statistics: Sequence[float]) -> Difference:
        """Return the difference whose numbers `measure` put into one tensor."""
        return cls(*statistics)

    def statistics(self) -> list[float]:
        """Return the numbers in the order that `from_statistics` takes."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def merge(self, other: Difference) -> Difference:
        """Return the difference over the union of two disjoint sets of elements."""
        worst = self if self.max_error >= other.max_error else other
        return Difference(
            self.count + other.count,
            self.sum_expected2 + other.sum_expected2,
            self.sum_actual2 + other.sum_actual2,
            self.sum_product + other.sum_product,
            self.sum_error2 + other.sum_error2,
            worst.max_error,
            worst.position,
            worst.expected_at,
            worst.actual_at,
            self.num_nonfinite + other.num_nonfinite,
        )

    @property
    def relative_error(self) -> float:
        """Return |actual - expected| / |expected| in the Frobenius norm; infinite where that is undefined."""
        if self.num_nonfinite or not math.isfinite(self.sum_error2):
            return math.inf
        if self.sum_error2 == 0.0:
            return 0.0
        return math.sqrt(self.sum_error2 / self.sum_expected2) if self.sum_expected2 > 0.0 else math.inf

    @property
    def scale(self) -> float | None:
        """Return the k that minimizes |actual - k * expected|."""
        return self.sum_product / self.sum_expected2 if self.sum_expected2 > 0.0 else None

    @property
    def cosine(self) -> float | None:
        """Return the cosine of the angle between the two."""
        norms = math.sqrt(self.sum_expected2) * math.sqrt(self.sum_actual2)
        return self.sum_product / norms if norms > 0.0 else None


def measure(expected: Tensor, actual: Tensor) -> Tensor:
    """Return the statistics of `actual` against `expected`.

    Shapes: two tensors of equal shape, any dtype; the result is (NUM_STATISTICS,) float64 on the device of
    `actual`, in the order of the fields of `Difference`.
    """
    if expected.shape != actual.shape:
        raise ValueError(f"cannot compare shape {tuple(actual.shape)} with {tuple(expected.shape)}")
    total = torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=actual.device)
    flat_expected = expected.to(actual.device).reshape(-1)
    flat_actual = actual.reshape(-1)
    for start in range(0, flat_actual.numel(), _CHUNK):
        part = _measure_chunk(
            flat_expected[start : start + _CHUNK], flat_actual[start : start + _CHUNK], start
        )
        total = part if start == 0 else _merge_statistics(total, part)
    return total


def _measure_chunk(expected: Tensor, actual: Tensor, start: int) -> Tensor:
    e = expected.to(torch.float64)
    a = actual.to(torch.float64)
    error = a - e
    size = error.abs()
    worst = torch.argmax(size)
    nonfinite = error.numel() - torch.isfinite(error).sum()
    return torch.stack(
        [
            error.new_tensor(float(error.numel())),
            torch.dot(e, e),
            torch.dot(a, a),
            torch.dot(e, a),
            torch.dot(error, error),
            size[worst],
            (worst + start).to(torch.float64),
            e[worst],
            a[worst],
            nonfinite.to(torch.float64),
        ]
    )


def _merge_statistics(first: Tensor, second: Tensor) -> Tensor:
    total = first + second
    worst = torch.where(first[5] >= second[5], first, second)
    total[5:9] = worst[5:9]
    return total


def fingerprint_bits(local: Tensor) -> Tensor:
    """Return a 64-bit hash of the exact values, for the bitwise comparison of replicas and repeats.

    Two tensors of one dtype have the same hash if and, up to a chance of about 2**-64, only if they are equal
    bit for bit at every position. Shape: () int64, on the device of `local`.
    """
    flat = local.detach().contiguous().reshape(-1)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = (flat.to(torch.uint8) if flat.dtype is torch.bool else flat.view(integer)).to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK]
        place = torch.arange(start, start + part.numel(), device=flat.device)
        total = total + mix(part * GOLDEN_RATIO + mix(place)).sum()
    return total

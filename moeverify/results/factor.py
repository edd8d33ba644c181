"""Factors, and the products of the run's integers that equal them: `2 = ep`, `0.5 = 1/ep`, `8 = ep * cp`."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.record import Record

# Relative tolerance for equal factors: the float64 coefficients of a fit have about ten correct digits.
SAME = 1e-6


class Source(Record):
    """An integer of the run that a bug can multiply or divide by, such as the size of a mesh axis."""

    name: str
    size: int


class Product(Record):
    """A quotient of products of sources: `Product(times=("ep",))` is ep, `Product(over=("ep",))` is 1/ep."""

    times: tuple[str, ...] = ()
    over: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the names of all its sources."""
        return (*self.times, *self.over)

    def measure(self, sizes: Mapping[str, int]) -> float:
        """Return the value of the product for the given sizes; a source without a size counts as 1."""
        value = 1.0
        for name in self.times:
            value *= sizes.get(name, 1)
        for name in self.over:
            value /= sizes.get(name, 1)
        return value


class Factor(Record):
    """A measured factor, and the simplest products that equal its `power`-th power.

    A norm is off by a factor whose square is an integer: there `power` is 2.
    """

    value: float
    power: int = 1
    equals: tuple[Product, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the distinct names of all sources that may be in it."""
        return tuple(dict.fromkeys(name for product in self.equals for name in product.sources))

    @property
    def is_one(self) -> bool:
        """Return whether the factor is 1 up to `SAME`."""
        return is_same(self.value, 1.0)

    @property
    def is_zero(self) -> bool:
        """Return whether the factor is 0 up to `SAME`."""
        return abs(self.value) < SAME


def is_same(first: float, second: float) -> bool:
    """Return whether two factors are equal up to rounding."""
    return abs(first - second) <= SAME * max(abs(first), abs(second))

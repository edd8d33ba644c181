"""What initial values are, in place of those that the seed and the names give."""

from __future__ import annotations

from typing import Literal

from moeverify.results.factor import Product
from moeverify.results.record import Record


class ScaledByShape(Record):
    """Each weight is so many times the right one as a rule gives of its own shape: from `least` to `largest` times.

    The `power` of each factor is one of `products`, which all give the same.
    """

    kind: Literal["scaled-by-shape"] = "scaled-by-shape"
    products: tuple[Product, ...]
    power: int
    least: float
    largest: float

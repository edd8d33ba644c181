"""Gradient norms that are sums of powers other than the root of a sum of squares."""

from __future__ import annotations

from typing import Literal

from moeverify.results.factor import Factor
from moeverify.results.record import Record

NormPart = Literal["all", "parameter", "module", "layer"]
"""The parts that contribute one number each: all gradients together, or each parameter, module or layer."""

PartNumber = Literal["norm", "absolute", "largest", "mean-square", "mean-absolute"]
"""The number of each part.

It is the norm, the sum of absolute values, the largest absolute value, the root mean square, or the mean
absolute value.
"""


class NormOfPowers(Record):
    """A norm that is the `root`-th root of the sum of the `power`-th powers of one number per part.

    `is_mean` replaces the sum by the mean, and `is_largest` by the maximum. `factor` multiplies the result.
    """

    kind: Literal["norm-of-powers"] = "norm-of-powers"
    part: NormPart
    number: PartNumber
    power: float
    root: float
    is_mean: bool = False
    is_largest: bool = False
    factor: Factor | None = None

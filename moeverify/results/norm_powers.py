"""A gradient norm that is another sum of powers than the root of a sum of squares."""

from __future__ import annotations

from typing import Literal

from moeverify.results.factor import Factor
from moeverify.results.record import Record

NormPart = Literal["all", "parameter", "module", "layer"]
"""Of what one number is taken: of all gradients, or of those of each parameter, module or layer."""

PartNumber = Literal["norm", "absolute", "largest", "mean-square", "mean-absolute"]
"""The number: the norm, the sum of absolute values, the largest of these, the root of the mean square, their mean."""


class NormOfPowers(Record):
    """The norm is the `root`-th root of the sum of the `power`-th powers of a number of each part.

    With `is_mean` it is the mean of the powers, with `is_largest` the largest number. A `factor` multiplies all.
    """

    kind: Literal["norm-of-powers"] = "norm-of-powers"
    part: NormPart
    number: PartNumber
    power: float
    root: float
    is_mean: bool = False
    is_largest: bool = False
    factor: Factor | None = None

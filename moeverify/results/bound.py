"""Where the bound of a tensor comes from, as data."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record

BoundPart = Literal[
    "exact", "fixed", "floor", "measured", "typical", "narrow parts", "sign flips", "cancellation"
]
"""A source of rounding:

- `measured`: the largest error of this tensor over the perturbed runs of one device
- `typical`: the median of that error over the tensors of the same kind
- `narrow parts`: parts of a float64 model that compute below float64
- `sign flips`: elements of an update whose sign the noise of the gradient may change
- `cancellation`: one unit of rounding of all tensors of the kind, for a tensor far smaller than they are
- `floor`: a few units of rounding of the precision
- `exact`, `fixed`: the tolerance of the case
"""


class Bound(Record):
    """The widest bound of a tensor over the steps: its parts, the largest of which decides.

    `error` is the relative error in that step. `factor` is the factor of the tolerance in the measured parts.
    """

    check: str
    tensor: str
    step: int
    error: float
    parts: dict[BoundPart, float]
    factor: float = 1.0

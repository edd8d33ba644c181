"""How far a tensor of one run may be from that of the other.

Measured, where there is a second run of one device whose initial weights were moved by a unit of rounding: 8 times
what that moved. Without one, from the dtype alone: gradients at the first recorded step to 2^10 units of rounding
(2^-4 where something computes in a narrower dtype), ten times more at each step after it, since each begins with
weights that the step before has rounded. An adaptive optimizer divides a gradient by its own size, so an element
smaller than the noise may move either way: relative noise e of a gradient becomes about sqrt(e) of its update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moeverify.case.schema import Tolerance
from moeverify.checks.bounds import Bounds, Criterion
from moeverify.results.checks import Kind

Precision = Literal["float64", "float32", "mixed"]

UNITS: Mapping[str, float] = {"float64": 2.0**-53, "float32": 2.0**-24, "mixed": 2.0**-9}
"""The largest relative error of one rounding; `mixed` is that of bfloat16."""

_BOUNDS: Mapping[str, float] = {"float64": 1e-10, "float32": 2.0**-13, "mixed": 2.0**-4}
_GROWTH = 10.0


@dataclass
class DtypeBounds(Bounds):
    """Bounds that nothing was measured for; `first` is the first step."""

    first: int = 0

    def bound(
        self,
        step: int,
        kind: str,
        name: str,
        criterion: Criterion,
        *,
        expected_norm: float,
        kind_norm: float,
    ) -> float:
        """Return the largest relative error; a tensor far below the others of its kind may be rounding."""
        if criterion.exact:
            return 0.0
        unit = _BOUNDS[self.precision] * _GROWTH ** max(step - self.first, 0)
        if kind == Kind.UPDATE:
            return math.sqrt(unit)
        drowned = 2.0**-23 * kind_norm / expected_norm if expected_norm > 0 else 0.0
        return max(unit, drowned)


def make_bounds(precision: Precision, noise: Mapping[str, float] | None, first: int) -> Bounds:
    """Return the bounds of a comparison; `noise` is what a second run of one device has shown, if there is one."""
    if noise is None or precision == "mixed":
        return DtypeBounds(Tolerance(), precision, noise or {}, first=first)
    return Bounds(Tolerance(), precision, noise)

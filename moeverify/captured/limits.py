"""How far a tensor of one run may be from that of the other.

Measured, where there is a second run of one device whose initial weights were moved by a unit of rounding: 8 times
what that moved. Without one, from the dtype alone: gradients at the first recorded step to 2^10 units of rounding
(2^-4 where something computes in a narrower dtype), ten times more at each step after it, since each begins with
weights that the step before has rounded. An adaptive optimizer divides a gradient by its own size, so an element
smaller than the noise may move either way: relative noise e of a gradient becomes about sqrt(e) of its update.

In 16 bits rounding moves some tokens to other experts, so that what routed experts, their router and the norm before
them get is off by the share of those tokens, and not by units of rounding: 2 to 10 % were seen where two ways to
mix precisions (autocast, and parameters cast by FSDP2) computed the same step. No dtype says how many tokens there
are near the border, so what is off by less than 2^-2 and has no cause is not decided without a measurement.
A measurement in 16 bits moves every weight by the largest error of one rounding, more than rounding does: 4 times
what that moved is allowed, and never less than without it, since one run may by chance move no token at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moeverify.capture.read import RecordedRun
from moeverify.case.schema import Tolerance
from moeverify.checks.bounds import Bounds, Criterion
from moeverify.results.checks import Kind

Precision = Literal["float64", "float32", "mixed"]

UNITS: Mapping[str, float] = {"float64": 2.0**-53, "float32": 2.0**-24, "mixed": 2.0**-9}
"""The error of one rounding relative to the norm of a tensor; `mixed` is that of bfloat16."""

UNDECIDED = 2.0**-2
"""In 16 bits, without a measurement, a tensor that is off by less may be rounding and may be none."""

_BOUNDS: Mapping[str, float] = {"float64": 1e-10, "float32": 2.0**-13, "mixed": 2.0**-4}
_GROWTH = 10.0
_NARROW_FACTOR = 4.0


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


@dataclass
class NarrowBounds(Bounds):
    """Bounds in 16 bits of which a run with nudged weights has shown the noise; `least` are those without it."""

    least: DtypeBounds = field(kw_only=True)

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
        """Return the largest relative error: what the noise allows, and what the dtype does at the first step."""
        norms = {"expected_norm": expected_norm, "kind_norm": kind_norm}
        measured = super().bound(step, kind, name, criterion, **norms)
        return max(measured, self.least.bound(self.least.first, kind, name, criterion, **norms))


def shows_noise_of(noise: RecordedRun, precision: Precision) -> bool:
    """Return whether the weights of a nudged run were moved as far as the arithmetic of a precision rounds."""
    if precision != "mixed" or noise.ranks[0].header.nudge_dtype is not None:
        return True
    dtypes = {
        line.dtype for (_, kind, _), line in noise.ranks[0].values.items() if kind == Kind.INITIAL_WEIGHT
    }
    return bool(dtypes) and dtypes <= {"bfloat16", "float16"}


def make_bounds(precision: Precision, noise: Mapping[str, float] | None, first: int) -> Bounds:
    """Return the bounds of a comparison; `noise` is what a second run of one device has shown, if there is one."""
    by_dtype = DtypeBounds(Tolerance(), precision, {}, first=first)
    if noise is None:
        return by_dtype
    if precision == "mixed":
        return NarrowBounds(Tolerance(factor=_NARROW_FACTOR), precision, noise, least=by_dtype)
    return Bounds(Tolerance(), precision, noise)

"""How much a logical tensor may differ from its golden.

`calibrated`: k times what one device at the recipe's precision differs from the float64 golden, measured for
each logical tensor over several perturbed runs. One tensor's measurement is a small sample, so it is raised to
the median over all tensors of its kind and step, and to a floor: for float64 1e-10, four to five orders above
the noise of reordered sums and four below the smallest real bug known to us; for the rest a few units of
rounding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from moeverify.case.schema import Precision, Tolerance
from moeverify.results.checks import check_of

# `mixed` computes in bfloat16 and keeps parameters, gradients, moments and updates in float32. No result of its
# arithmetic is nearer than a unit of bfloat16, so the floors are those of bfloat16. The epsilon is that of what is
# kept: by it weights are nudged, and a tensor far smaller than the others of its kind is still held in float32,
# where in `bfloat16` it could drown in them. How far its bfloat16 arithmetic is off is measured, tensor by tensor.
EPSILON: Mapping[Precision, float] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "bfloat16": 2.0**-7,
    "mixed": 2.0**-23,
}
FLOOR: Mapping[Precision, float] = {
    "float64": 1e-10,
    "float32": 4 * 2.0**-23,
    "bfloat16": 2.0**-7,
    "mixed": 2.0**-7,
}
FLIP_FLOOR: Mapping[Precision, float] = {
    "float64": 0.0,
    "float32": 16 * 2.0**-23,
    "bfloat16": 2.0**-6,
    "mixed": 2.0**-6,
}


def noise_key(step: int, kind: str, name: str, *, forced: bool = False) -> str:
    """Return the key under which the noise of a logical tensor is stored.

    A forced step starts from the golden's state: what the steps before have rounded is not in its noise. The
    first step is the same in both.
    """
    return f"{'forced/' if forced and step > 0 else ''}{step}/{kind}/{name}"


def update_drift_key(step: int, name: str, *, forced: bool = False) -> str:
    """Return the key of how far the noise of gradients moves an update, by an adaptive optimizer below float64."""
    return noise_key(step, "moved", name, forced=forced)


def sign_flip_key(step: int, name: str, *, forced: bool = False) -> str:
    """Return the key of the part of `update_drift_key` that elements have which turn their sign."""
    return noise_key(step, "turned", name, forced=forced)


@dataclass
class Bounds:
    """The bounds of one case. `noise` is what calibration measured, by `noise_key`; `forced` says of which steps."""

    tolerance: Tolerance
    precision: Precision
    noise: Mapping[str, float]
    forced: bool = False
    _typical: dict[tuple[int, str], float] = field(default_factory=dict)

    def bound(self, step: int, kind: str, name: str, expected_norm: float, kind_norm: float) -> float:
        """Return the largest error that is allowed, in the unit of the check's metric.

        `kind_norm` is the norm of all tensors of this kind and step together: what lies below its rounding is
        noise even where the tensor itself is smaller still. Below float64 that holds only for a tensor whose own
        noise was not measured.
        """
        check = check_of(kind)
        if check.exact or self.tolerance.kind == "exact":
            return 0.0
        if self.tolerance.kind == "fixed":
            assert self.tolerance.rtol is not None
            assert self.tolerance.atol is not None
            slack = self.tolerance.atol / expected_norm if expected_norm > 0 else self.tolerance.atol
            return self.tolerance.rtol + slack
        own = self.noise.get(noise_key(step, kind, name, forced=self.forced), 0.0)
        measured = max(own, self._typical_noise(step, kind))
        if kind == "update":
            measured = self._propagated(step, name, own, measured)
        if not math.isfinite(measured):
            measured = 0.0  # an unusable measurement allows nothing
        if check.metric == "largest":
            return max(self.tolerance.factor * measured, FLIP_FLOOR[self.precision])
        rounding = EPSILON[self.precision] * kind_norm / expected_norm if expected_norm > 0 else 0.0
        if self.precision != "float64" and own > 0.0:
            # It was measured: below float64 one unit of the whole kind would hide small tensors.
            rounding = 0.0
        return max(self.tolerance.factor * measured, FLOOR[self.precision], rounding)

    def _propagated(self, step: int, name: str, own: float, measured: float) -> float:
        """Return the noise of an update, given what was measured and what the noise of gradients does to it.

        A few runs miss most elements that may turn, so what turning does is added to what they showed. Nor is more
        allowed than what all of the gradients' noise does: that is known of each tensor, so the median of all is no
        help.
        """
        moved = self.noise.get(update_drift_key(step, name, forced=self.forced))
        if moved is None:
            return measured
        shown = own / self.tolerance.factor
        turned = self.noise[sign_flip_key(step, name, forced=self.forced)]
        return min(max(measured, turned + shown), moved + shown)

    def zero_bound(self) -> float:
        """Return what a tensor that should be zero may be, relative to all tensors of its kind and step."""
        return EPSILON[self.precision] if self.tolerance.kind != "exact" else 0.0

    def _typical_noise(self, step: int, kind: str) -> float:
        key = (step, kind)
        if key not in self._typical:
            prefix = noise_key(step, kind, "", forced=self.forced)
            values = [value for name, value in self.noise.items() if name.startswith(prefix)]
            largest = check_of(kind).metric == "largest"
            finite = [value for value in values if math.isfinite(value)]
            pool = max if largest else statistics.median
            self._typical[key] = pool(finite) if finite else 0.0
        return self._typical[key]

"""How much a logical tensor may differ from its golden.

`calibrated`: k times what one device at the recipe's precision differs from the float64 golden, measured for
each logical tensor over several perturbed runs. One tensor's measurement is a small sample, so it is raised to
the median over all tensors of its kind and step, and to a floor: for float64 1e-10, four to five orders above
the noise of reordered sums and four below the smallest real bug known to us; for the rest a few units of
rounding.

Units: errors and bounds are relative to the golden's Frobenius norm, or for the metric `largest` in the unit of the
elements.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moeverify.case.schema import Precision, Tolerance
from moeverify.golden.noise import EPSILON, noise_key, sign_flip_key, update_drift_key
from moeverify.results.checks import Kind

# No result of bfloat16's arithmetic is nearer than a unit of it, so the floors of `mixed` are those of `bfloat16`.
FLOOR: Mapping[Precision, float] = {
    "float64": 1e-10,
    "float32": 4 * 2.0**-23,
    "bfloat16": 2.0**-7,
    "mixed": 2.0**-7,
}
# Scores of experts lie in [0, 1], so these are absolute: so near to each other, two scores are the same number.
FLIP_FLOOR: Mapping[Precision, float] = {
    "float64": 0.0,
    "float32": 16 * 2.0**-23,
    "bfloat16": 2.0**-6,
    "mixed": 2.0**-6,
}

Metric = Literal["relative", "largest"]


@dataclass(frozen=True)
class Criterion:
    """How the tensors of a check are measured.

    `exact` ones must agree bit for bit whatever the tolerance. The metric is the relative error in the Frobenius
    norm, or the largest absolute difference of an element.
    """

    exact: bool = False
    metric: Metric = "relative"


@dataclass
class Bounds:
    """The bounds of one case. `noise` is what calibration measured, by `noise_key`; `forced` says of which steps."""

    tolerance: Tolerance
    precision: Precision
    noise: Mapping[str, float]
    forced: bool = False
    _typical: dict[tuple[int, str], float] = field(default_factory=dict)

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
        """Return the largest error that is allowed, in the unit of the criterion's metric.

        `expected_norm` is the golden's, `kind_norm` that of all tensors of this kind and step together: what lies
        below its rounding is noise even where the tensor itself is smaller still. Below float64 that holds only for
        a tensor whose own noise was not measured.
        """
        if criterion.exact or self.tolerance.kind == "exact":
            return 0.0
        if self.tolerance.kind == "fixed":
            return self._fixed(expected_norm)
        if _is_counter(kind, name):
            return FLOOR["float64"]
        own = self.noise.get(noise_key(step, kind, name, forced=self.forced), 0.0)
        measured = max(own, self._typical_noise(step, kind, criterion.metric))
        if kind in (Kind.UPDATE, Kind.OPTIMIZER_STATE):
            measured = self._add_gradient_noise(step, name, own, measured)
        if not math.isfinite(measured):
            measured = 0.0  # an unusable measurement allows nothing
        if criterion.metric == "largest":
            return max(self.tolerance.factor * measured, FLIP_FLOOR[self.precision])
        # One unit of the norm of the whole kind: a tensor far below it is the small difference of large numbers.
        rounding = EPSILON[self.precision] * kind_norm / expected_norm if expected_norm > 0 else 0.0
        if self.precision != "float64" and own > 0.0:
            # It was measured: below float64 one unit of the whole kind would hide small tensors.
            rounding = 0.0
        return max(self.tolerance.factor * measured, FLOOR[self.precision], rounding)

    def _fixed(self, expected_norm: float) -> float:
        """Return |actual - expected| <= atol + rtol * |expected|, divided by |expected|."""
        assert self.tolerance.rtol is not None
        assert self.tolerance.atol is not None
        slack = self.tolerance.atol / expected_norm if expected_norm > 0 else self.tolerance.atol
        return self.tolerance.rtol + slack

    def _add_gradient_noise(self, step: int, name: str, own: float, measured: float) -> float:
        """Return the noise of an update or a moment: what was measured, and what the noise of gradients does to it.

        A few runs of calibration miss most of the elements whose update may change its sign, so what sign flips do is
        added to what the runs showed. Nor is more allowed than what all of the gradients' noise does: that drift is
        known of each tensor, so the median over all tensors is no help. The caller multiplies by the factor k; drift
        and flips are the effects of k times the noise, divided by k, and `own` is added once: own / k.
        """
        drift = self.noise.get(update_drift_key(step, name, forced=self.forced))
        if drift is None:
            return measured
        shown = own / self.tolerance.factor
        flips = self.noise[sign_flip_key(step, name, forced=self.forced)]
        return min(max(measured, flips + shown), drift + shown)

    def zero_bound(self) -> float:
        """Return what a tensor that should be zero may be, relative to all tensors of its kind and step."""
        return EPSILON[self.precision] if self.tolerance.kind != "exact" else 0.0

    def _typical_noise(self, step: int, kind: str, metric: Metric) -> float:
        """Return the median of the noise of all tensors of a kind and step, for `largest` the maximum.

        A tensor's own measurement is the largest of three or four runs, which by chance may be all alike: the median
        of its kind says what they would have shown another time.
        """
        key = (step, kind)
        if key not in self._typical:
            prefix = noise_key(step, kind, "", forced=self.forced)
            values = [value for name, value in self.noise.items() if name.startswith(prefix)]
            finite = [value for value in values if math.isfinite(value)]
            pool = max if metric == "largest" else statistics.median
            self._typical[key] = pool(finite) if finite else 0.0
        return self._typical[key]


def _is_counter(kind: str, name: str) -> bool:
    """Return whether a tensor counts the optimizer's steps: a whole number, which no precision rounds."""
    return kind == Kind.OPTIMIZER_STATE and name.endswith(".step")

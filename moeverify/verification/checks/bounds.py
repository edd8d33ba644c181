"""Bounds on the difference between a logical tensor and its golden.

`calibrated`: k times the difference between one device at the recipe's precision and the float64 golden.
The difference is measured for each logical tensor over several perturbed runs. The measurement of one
tensor is a small sample. It is raised to the median over all tensors of its kind and step, and to a floor.
For float64 the floor is 1e-10: four to five orders of magnitude above the noise of reordered sums, and four
below the smallest real bug known to us. For other precisions the floor is a few units of rounding.

A user's model may compute parts below float64 in a float64 case. The effect of their roundings is measured for
each tensor alone: it raises neither the median nor the bound of a tensor that does not depend on them.

Units: errors and bounds are relative to the golden's Frobenius norm. For the metric `largest` they have the
unit of the elements.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from moeverify.cases.schema import Precision, Tolerance
from moeverify.results.bound import BoundPart
from moeverify.results.checks import Kind
from moeverify.verification.compare.assembled import Key
from moeverify.verification.golden.noise import (
    EPSILON,
    PERTURBED_RUNS,
    PLAIN,
    WIDEST,
    narrow_key,
    noise_key,
    sign_flip_key,
    squares_key,
    storage_key,
    update_drift_key,
)

# A bfloat16 result is rounded to about one unit, so `mixed` uses the floors of `bfloat16`.
FLOOR: Mapping[Precision, float] = {
    "float64": 1e-10,
    "float32": 4 * 2.0**-23,
    "bfloat16": 2.0**-7,
    "mixed": 2.0**-7,
}
# Expert scores lie in [0, 1], so these floors are absolute. Two scores closer than this count as equal.
FLIP_FLOOR: Mapping[Precision, float] = {
    "float64": 0.0,
    "float32": 16 * 2.0**-23,
    "bfloat16": 2.0**-6,
    "mixed": 2.0**-6,
}

Metric = Literal["relative", "largest"]

Parts = Mapping[BoundPart, float]
"""Errors that each source of rounding allows; the largest one is the bound."""


@dataclass(frozen=True)
class Criterion:
    """Measure of the tensors of a check.

    `exact` tensors must match bit for bit, whatever the tolerance. `metric` is the relative error in the
    Frobenius norm, or the largest absolute difference of an element.
    """

    exact: bool = False
    metric: Metric = "relative"


class Norms(NamedTuple):
    """Norm of the golden tensor, and of all golden tensors of its kind and step together."""

    expected: float
    kind: float


@dataclass
class Bounds:
    """Bounds of one case.

    `noise` is the calibration measurement by `noise_key`. `forced` selects the measurements of forced
    steps.
    """

    tolerance: Tolerance
    precision: Precision
    noise: Mapping[str, float]
    forced: bool = False
    _typical: dict[tuple[int, str], float] = field(default_factory=dict)

    def bound(self, key: Key, criterion: Criterion, norms: Norms) -> float:
        """Return the largest allowed error, in the unit of the criterion's metric.

        A difference below the rounding of `norms.kind` is noise, even if the tensor itself is smaller. Below
        float64 this rule applies only to tensors whose own noise was not measured.
        """
        return max(self.list_parts(key, criterion, norms).values())

    def list_parts(self, key: Key, criterion: Criterion, norms: Norms) -> dict[BoundPart, float]:
        """Return the errors that each source of rounding allows; the largest one is the bound.

        Takes the arguments of `bound`.
        """
        step, kind, name = key
        if criterion.exact or self.tolerance.kind == "exact":
            return {"exact": 0.0}
        if self.tolerance.kind == "fixed":
            return {"fixed": self._fixed(norms.expected)}
        if _is_counter(kind, name):
            return {"floor": FLOOR["float64"]}
        own = self.noise.get(noise_key(step, kind, name, forced=self.forced), 0.0)
        measured: dict[BoundPart, float] = {
            "measured": own,
            "typical": self._typical_noise(step, kind, criterion.metric),
            "narrow parts": 0.0 if self.forced else self.noise.get(narrow_key(step, kind, name), 0.0),
        }
        if kind in (Kind.UPDATE, Kind.OPTIMIZER_STATE):
            measured = self._add_gradient_noise(step, name, measured)
            squares = self.noise.get(squares_key(step, name, forced=self.forced))
            measured |= {} if squares is None else {"squares": own + squares}
        if not all(map(math.isfinite, measured.values())):
            measured = {}  # An infinite or NaN measurement allows nothing.
        parts = {part: self.tolerance.factor * noise for part, noise in measured.items()}
        if criterion.metric == "largest":
            return parts | {"floor": FLIP_FLOOR[self.precision]}
        # One rounding unit of the norm of the whole kind: a tensor far below it is a small difference of
        # large numbers.
        rounding = EPSILON[self.precision] * norms.kind / norms.expected if norms.expected > 0 else 0.0
        if self.precision != "float64" and own > 0.0:
            # The noise was measured. Below float64 one unit of the whole kind would hide errors of small
            # tensors.
            rounding = 0.0
        return parts | {"floor": FLOOR[self.precision], "cancellation": rounding}

    def list_sources(self, key: Key) -> dict[str, Any]:
        """Return the sources of a tensor's measured error, as fields of `Bound`."""
        step, kind, name = key
        place = noise_key(step, kind, name, forced=self.forced)
        run = self.noise.get(f"{WIDEST}{place}")
        return {
            "run": None if run is None else PERTURBED_RUNS[int(run)],
            "plain": self.noise.get(f"{PLAIN}{place}"),
            "stored": self.noise.get(storage_key(step, name)) if kind == Kind.UPDATE else None,
        }

    def _fixed(self, expected_norm: float) -> float:
        """Return the bound of |actual - expected| <= atol + rtol * |expected|, divided by |expected|."""
        assert self.tolerance.rtol is not None
        assert self.tolerance.atol is not None
        slack = self.tolerance.atol / expected_norm if expected_norm > 0 else self.tolerance.atol
        return self.tolerance.rtol + slack

    def _add_gradient_noise(
        self, step: int, name: str, measured: dict[BoundPart, float]
    ) -> dict[BoundPart, float]:
        """Return the noise of an update or a moment, including the effect of the noise of the gradients.

        A few calibration runs miss most elements whose update may change sign, so the effect of sign flips
        is added to the measured noise. The result is capped by the drift, which is the effect of all
        gradient noise on this tensor. The drift is known per tensor, so the cap also applies to the median
        over all tensors.

        The caller multiplies by the factor k. Drift and flips are the effects of k times the noise, divided
        by k. The measured noise is added once, divided by k.
        """
        drift = self.noise.get(update_drift_key(step, name, forced=self.forced))
        if drift is None:
            return measured
        shown = measured["measured"] / self.tolerance.factor
        flips = self.noise[sign_flip_key(step, name, forced=self.forced)]
        return {
            part: min(noise, drift + shown)
            for part, noise in {**measured, "sign flips": flips + shown}.items()
        }

    def zero_bound(self) -> float:
        """Return the bound for a tensor that should be zero, relative to all tensors of its kind and step."""
        return EPSILON[self.precision] if self.tolerance.kind != "exact" else 0.0

    def _typical_noise(self, step: int, kind: str, metric: Metric) -> float:
        """Return the median noise over the tensors of a kind and step; for `largest`, the maximum.

        A tensor's own measurement is the largest of three or four runs, which may agree by chance. The
        median of its kind estimates the noise of further runs. Tensors that depend on parts below the
        precision of the recipe do not count.
        """
        unit = (step, kind)
        if unit not in self._typical:
            prefix = noise_key(step, kind, "", forced=self.forced)
            values = [
                value
                for key, value in self.noise.items()
                if key.startswith(prefix)
                and narrow_key(step, kind, key.removeprefix(prefix)) not in self.noise
            ]
            finite = [value for value in values if math.isfinite(value)]
            pool = max if metric == "largest" else statistics.median
            self._typical[unit] = pool(finite) if finite else 0.0
        return self._typical[unit]


def _is_counter(kind: str, name: str) -> bool:
    """Return whether a tensor counts the optimizer's steps: an integer, exact at every precision."""
    return kind == Kind.OPTIMIZER_STATE and name.endswith(".step")

"""Bounds for the difference between a tensor of one run and of the other.

With a measurement: a second run of one device has its initial weights moved by a unit of rounding. The
bound is 8 times the resulting difference.

Without a measurement the dtype determines the bound. For gradients at the first recorded step it is 2^-13
in float32 (2^10 units of rounding) and 1e-10 in float64. It is 2^-4 if some computation uses a narrower
dtype. It grows tenfold at each later step, since each step begins with weights that the previous step has
rounded. An adaptive optimizer divides a gradient by its own magnitude, so an element smaller than the noise
may move either way. Relative noise e of a gradient becomes about sqrt(e) in its update. A gradient far smaller
than all gradients together may be rounding only; so may then its moments and updates, however large.

In 16 bits, rounding sends some tokens to other experts. The gradients of routed experts, their router and
the norm before them then differ by the share of those tokens, not by units of rounding. 2 to 10 % were
observed where two kinds of mixed precision (autocast, and parameters cast by FSDP2) computed the same step.
The dtype does not determine the number of tokens near the border. A difference below 2^-2 without a cause
is therefore undecided unless there is a measurement. A measurement in 16 bits moves every weight by the
largest error of one rounding, which is more than rounding does. The bound is then 4 times the resulting
difference. It is at least the bound without a measurement at the first step: a single run may by chance
move no token at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moeverify.cases.schema import Tolerance
from moeverify.results.checks import CheckName, Kind
from moeverify.results.finding import CheckResult, Finding, Inconclusive
from moeverify.scripts.compare.entries import split_state
from moeverify.scripts.record.read import RecordedRun
from moeverify.verification.checks.bounds import Bounds, Criterion, Norms
from moeverify.verification.compare.assembled import Key

Precision = Literal["float64", "float32", "mixed"]

UNITS: Mapping[str, float] = {"float64": 2.0**-53, "float32": 2.0**-24, "mixed": 2.0**-9}
"""The error of one rounding relative to the norm of a tensor; `mixed` is that of bfloat16."""

UNDECIDED = 2.0**-2
"""Relative error in 16 bits up to which an unmeasured difference may be rounding or an error."""

_BOUNDS: Mapping[str, float] = {"float64": 1e-10, "float32": 2.0**-13, "mixed": 2.0**-4}
UNIT = 2.0**-23
"""The rounding of a sum in float32, relative to its largest term."""

_GROWTH = 10.0
_NARROW_FACTOR = 4.0


@dataclass
class ScriptBounds(Bounds):
    """Bounds that allow moments and updates the rounding of their gradients, which may be their only content.

    `rounding` has the relative rounding of a parameter's gradients up to a step, by step and name.
    """

    rounding: Mapping[tuple[int, str], float] = field(default_factory=dict)

    def bound(self, key: Key, criterion: Criterion, norms: Norms) -> float:
        """Return the larger of the bound by noise and the bound by the rounding of gradients."""
        return max(super().bound(key, criterion, norms), self.carry(key))

    def carry(self, key: Key) -> float:
        """Return the relative error of a moment or an update by the rounding of its gradients."""
        step, kind, name = key
        if kind == Kind.OPTIMIZER_STATE:
            return self.rounding.get((step, split_state(name)[0]), 0.0)
        return math.sqrt(self.rounding.get((step, name), 0.0)) if kind == Kind.UPDATE else 0.0


@dataclass
class DtypeBounds(ScriptBounds):
    """Bounds from the dtype, without a measurement; `first` is the first recorded step."""

    first: int = 0

    def bound(self, key: Key, criterion: Criterion, norms: Norms) -> float:
        """Return the largest relative error; a tensor far smaller than others of its kind may be rounding."""
        if criterion.exact:
            return 0.0
        step, kind, _ = key
        unit = _BOUNDS[self.precision] * _GROWTH ** max(step - self.first, 0)
        if kind == Kind.UPDATE:
            return max(math.sqrt(unit), self.carry(key))
        drowned = UNIT * norms.kind / norms.expected if norms.expected > 0 else 0.0
        return max(unit, drowned, self.carry(key))


@dataclass
class NarrowBounds(ScriptBounds):
    """Bounds in 16 bits with noise measured by a nudged run; `least` are the bounds without a measurement."""

    least: DtypeBounds = field(kw_only=True)

    def bound(self, key: Key, criterion: Criterion, norms: Norms) -> float:
        """Return the larger of the bound by measured noise and the bound by dtype at the first step."""
        _, kind, name = key
        least = self.least.bound((self.least.first, kind, name), criterion, norms)
        return max(super().bound(key, criterion, norms), least)


def list_row_bounds(precision: Precision, steps: Sequence[int]) -> dict[int, float]:
    """Return the largest relative error of equal rows of a computed input by step."""
    return {step: _BOUNDS[precision] * _GROWTH ** (step - steps[0]) for step in steps}


def shows_noise_of(noise: RecordedRun, precision: Precision) -> bool:
    """Return whether the nudge of a run is as large as the rounding of the precision's arithmetic."""
    if precision != "mixed" or noise.ranks[0].header.nudge_dtype is not None:
        return True
    dtypes = {
        line.dtype for (_, kind, _), line in noise.ranks[0].values.items() if kind == Kind.INITIAL_WEIGHT
    }
    return bool(dtypes) and dtypes <= {"bfloat16", "float16"}


def make_bounds(
    precision: Precision,
    noise: Mapping[str, float] | None,
    first: int,
    rounding: Mapping[tuple[int, str], float],
) -> Bounds:
    """Return the bounds of a comparison.

    `noise` is the measured noise of a second run, or None. `rounding` is that of `ScriptBounds`.
    """
    by_dtype = DtypeBounds(Tolerance(), precision, {}, first=first, rounding=rounding)
    if noise is None:
        return by_dtype
    if precision == "mixed":
        tolerance = Tolerance(factor=_NARROW_FACTOR)
        return NarrowBounds(tolerance, precision, noise, rounding=rounding, least=by_dtype)
    return ScriptBounds(Tolerance(), precision, noise, rounding=rounding)


def measure_rounding(run: RecordedRun) -> dict[tuple[int, str], float]:
    """Return the rounding of all gradients relative to each one, the largest up to a step, by step and name.

    A gradient of zeros has none: its updates are exact.
    """
    found: dict[tuple[int, str], float] = {}
    for step in run.steps:
        lines = {
            key[2]: line
            for rank in run.ranks
            for key, line in rank.values.items()
            if key[:2] == (step, Kind.GRADIENT)
        }
        total = math.sqrt(sum(line.squares for line in lines.values()))
        for name, line in lines.items():
            own = UNIT * total / math.sqrt(line.squares) if line.squares > 0.0 else 0.0
            found[step, name] = max(own, found.get((step - 1, name), 0.0))
    return found


# The error of a gradient bounds the error of the total norm. Its effect on moments and on adaptive updates is
# at most its square root, as in the bounds.
_LIMITS: Mapping[str, float] = {
    CheckName.GRADIENT: UNDECIDED,
    CheckName.GRADIENT_NORM: UNDECIDED,
    CheckName.UPDATE: math.sqrt(UNDECIDED),
    CheckName.OPTIMIZER_STATE: math.sqrt(UNDECIDED),
}


def are_undecided(findings: Sequence[Finding]) -> bool:
    """Return whether all findings are small, unexplained differences of gradients and their consequences."""
    origins = [finding for finding in findings if not finding.follows]
    return (
        bool(findings)
        and all(finding.check in _LIMITS and finding.error <= _LIMITS[finding.check] for finding in findings)
        and all(
            finding.check == CheckName.GRADIENT and finding.explanation is None and not finding.observations
            for finding in origins
        )
    )


def set_aside(result: CheckResult, findings: Sequence[Finding]) -> CheckResult:
    """Return the result of a check with undecided findings: a pass with inconclusive tensors."""
    own = tuple(
        Inconclusive(tensor=finding.tensor, step=finding.step, limit=_LIMITS[finding.check])
        for finding in findings
        if finding.check == result.name
    )
    changes = {"verdict": "pass", "inconclusive": len(own), "inconclusive_tensors": own}
    return result.model_copy(update=changes) if own else result

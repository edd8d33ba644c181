"""Noise of one device: its keys in the stored golden, and the unit of rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from moeverify.cases.schema import Precision
from moeverify.results.bound import PerturbedRun
from moeverify.results.checks import Kind

PLAIN, WIDEST = "plain/", "widest/"
"""Prefixes of a `noise_key`: the error of the plain run, and the place of the widest in `PERTURBED_RUNS`."""

PERTURBED_RUNS: tuple[PerturbedRun, ...] = get_args(PerturbedRun)

HELD_KEY, FREE_KEY = "near ties/held", "near ties/free"
"""The keys of the numbers of choices near a tie in the perturbed runs; see `NearTieCounts`."""

# `mixed` computes in bfloat16 and stores parameters, gradients, moments and updates in float32. Its epsilon
# is the one of float32: a tensor far smaller than the others of its kind is still stored in float32. In
# `bfloat16` it could vanish beside them. The error of the bfloat16 arithmetic is measured per tensor.
EPSILON: Mapping[Precision, float] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "bfloat16": 2.0**-7,
    "mixed": 2.0**-23,
}
"""The distance from 1.0 to the next larger number, in the precision in which parameters are stored."""


def noise_key(step: int, kind: str, name: str, *, forced: bool = False) -> str:
    """Return the key of the noise of a logical tensor.

    A forced step starts from the golden's state, so its noise has no rounding errors of earlier steps. The
    first step has the same key in both cases.
    """
    return f"{'forced/' if forced and step > 0 else ''}{step}/{kind}/{name}"


def storage_key(step: int, name: str) -> str:
    """Return the key of the error that storing the golden's weight in its narrow dtype adds to an update."""
    return f"storage/{noise_key(step, Kind.UPDATE, name)}"


def narrow_key(step: int, kind: str, name: str) -> str:
    """Return the key of the noise that parts below float64 cause in a float64 run; see `narrow_rounding`."""
    return f"narrow/{noise_key(step, kind, name)}"


def update_drift_key(step: int, name: str, *, forced: bool = False) -> str:
    """Return the key of the error of an update or Adam moment that gradient noise causes below float64."""
    return noise_key(step, "update drift", name, forced=forced)


def sign_flip_key(step: int, name: str, *, forced: bool = False) -> str:
    """Return the key of the part of `update_drift_key` from elements whose update changes its sign."""
    return noise_key(step, "sign flips", name, forced=forced)


def squares_key(step: int, name: str, *, forced: bool = False) -> str:
    """Return the key of the part of a second moment of Adam that the square of the gradient noise adds."""
    return noise_key(step, "squares", name, forced=forced)

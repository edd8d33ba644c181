"""The noise of one device: under which keys its distance from the golden is stored, and the unit of rounding."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.case.schema import Precision

# `mixed` computes in bfloat16 and keeps parameters, gradients, moments and updates in float32. The epsilon is that of
# what is kept: by it weights are nudged, and a tensor far smaller than the others of its kind is still kept in
# float32, where in `bfloat16` it could drown in them. How far its arithmetic is off is measured, tensor by tensor.
EPSILON: Mapping[Precision, float] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "bfloat16": 2.0**-7,
    "mixed": 2.0**-23,
}
"""The distance of 1.0 to the next larger number, of the precision in which parameters are kept."""


def noise_key(step: int, kind: str, name: str, *, forced: bool = False) -> str:
    """Return the key under which the noise of a logical tensor is stored.

    A forced step starts from the golden's state: what the steps before have rounded is not in its noise. The
    first step is the same in both.
    """
    return f"{'forced/' if forced and step > 0 else ''}{step}/{kind}/{name}"


def update_drift_key(step: int, name: str, *, forced: bool = False) -> str:
    """Return the key of how far the noise of gradients moves an update or a moment of Adam below float64."""
    return noise_key(step, "update drift", name, forced=forced)


def sign_flip_key(step: int, name: str, *, forced: bool = False) -> str:
    """Return the key of the part of `update_drift_key` that comes from elements whose update changes its sign."""
    return noise_key(step, "sign flips", name, forced=forced)

"""Rounding of errors for comparisons with each other."""

from __future__ import annotations


def comparable(error: float) -> float:
    """Return an error rounded to nine digits, so that errors equal up to rounding compare as equal.

    For example, all tensors that are twice as large as expected have a relative error of 1 up to about
    1e-16. The largest of these errors depends on the processor. After rounding, the first tensor is chosen
    on every machine.
    """
    return float(f"{error:.8e}")

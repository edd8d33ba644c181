"""Errors as they are compared with each other."""

from __future__ import annotations


def comparable(error: float) -> float:
    """Return an error to nine digits: of errors that are equal but for rounding, none is larger.

    All tensors that are twice as large as expected are off by 1, give or take 1e-16. Which of them is off most
    depends on the processor; the first of them is the same everywhere.
    """
    return float(f"{error:.8e}")

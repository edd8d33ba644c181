"""Errors of all tensors of a check as shares of their bounds, as data."""

from __future__ import annotations

from moeverify.results.record import Record


class ErrorMap(Record):
    """Errors of the tensors of one check, each divided by its bound; a value above 1 is a finding.

    A parameter and its optimizer moments share one row, which has their largest value. The value is None at
    a step without a comparison, and infinite for a nonzero error with a bound of 0. Shape: shares (tensors,
    steps).
    """

    check: str
    tensors: tuple[str, ...]
    steps: tuple[int, ...]
    shares: tuple[tuple[float | None, ...], ...]

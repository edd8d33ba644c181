"""How near every tensor of a check came to its bound, as data."""

from __future__ import annotations

from moeverify.results.record import Record


class ErrorMap(Record):
    """Errors of one check's tensors, each divided by its bound; above 1 is a finding.

    Moments of the optimizer are one row with their parameter, the largest of them. A step at which a tensor was not
    compared has None, and an error over a bound of 0 is infinite. Shape: shares (tensors, steps).
    """

    check: str
    tensors: tuple[str, ...]
    steps: tuple[int, ...]
    shares: tuple[tuple[float | None, ...], ...]

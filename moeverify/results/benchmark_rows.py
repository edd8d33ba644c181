"""Rows of the fault benchmark and of the clean matrix, as plain data without torch."""

from __future__ import annotations

import math

from moeverify.results.finding import Finding
from moeverify.results.record import Record


class FaultRow(Record):
    """One injected fault: whether it was detected, located, named, and visible in a loss curve.

    `line_shown` is whether the report shows a line of the fault's own file: the first wrong operation, or a
    line to look at. `finding` is the first finding that follows from no other; its step is -1 before the first step.
    `loss_curve` is whether the losses of a step differ by more than a relative 1e-3, the usual criterion in
    practice. `found_in` is set if the fault shows only in a wider precision and the run in its own
    precision passes. The losses and norms are always from the run in its own precision.
    """

    number: str
    title: str
    source: str
    is_moe: bool
    verdict: str
    detected: bool
    located: bool
    cause_named: bool
    line_shown: bool = False
    loss_curve: bool
    loss_and_norm: bool = False
    finding: Finding | None = None
    reason: str = ""
    seconds: float = 0.0
    found_in: str = ""


class CleanRow(Record):
    """One run without a fault: a layout, precision, seed or recipe that must not change the result.

    `worst` is the largest error as a share of its bound. `blind` is the number of tensors, out of
    `tensors`, with a bound too wide to be conclusive.
    """

    name: str
    group: str
    verdict: str
    worst: float
    tensors: int = 0
    blind: int = 0
    seconds: float = 0.0
    detail: str = ""


def upper_bound(num_hits: int, num_runs: int) -> float:
    """Return the upper end of the exact (Clopper-Pearson) one-sided 95 % confidence interval of a rate."""
    return _bisect(num_hits, num_runs, 0.05) if num_hits < num_runs else 1.0


def lower_bound(num_hits: int, num_runs: int) -> float:
    """Return the lower end of the exact (Clopper-Pearson) one-sided 95 % confidence interval of a rate."""
    return 1.0 - upper_bound(num_runs - num_hits, num_runs)


def _bisect(num_hits: int, num_runs: int, tail: float) -> float:
    """Return the rate at which at most `num_hits` hits in `num_runs` runs have probability `tail`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(num_hits, num_runs, middle) > tail:
            low = middle
        else:
            high = middle
    return high


def _at_most(num_hits: int, num_runs: int, rate: float) -> float:
    return sum(
        math.comb(num_runs, hits) * rate**hits * (1.0 - rate) ** (num_runs - hits)
        for hits in range(num_hits + 1)
    )

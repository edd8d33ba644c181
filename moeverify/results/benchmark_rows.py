"""How a run of the fault benchmark or of the clean matrix came out, as plain data without torch."""

from __future__ import annotations

import math

from moeverify.results.finding import Finding
from moeverify.results.record import Record


class FaultRow(Record):
    """One injected fault: whether it was detected, located, its cause named, and what a loss curve would show.

    `finding` is the first one that follows from none; its step is -1 before the first step. `loss_curve` says
    whether the losses of the same steps differ by more than a relative 1e-3, which is the practice in the field.
    `found_in` is the wider precision that alone has shown the fault, where its own passes; losses and norms are those
    of its own.
    """

    number: str
    title: str
    source: str
    is_moe: bool
    verdict: str
    detected: bool
    located: bool
    cause_named: bool
    loss_curve: bool
    loss_and_norm: bool = False
    finding: Finding | None = None
    reason: str = ""
    seconds: float = 0.0
    found_in: str = ""


class CleanRow(Record):
    """One clean run: a layout, a precision, a seed, a recipe, and what it should not change.

    `worst` is the largest share of a bound that was used; `blind` of `tensors` have a bound that shows little.
    """

    name: str
    group: str
    verdict: str
    worst: float
    tensors: int = 0
    blind: int = 0
    seconds: float = 0.0
    detail: str = ""


def upper_bound(num_hits: int, num_runs: int, confidence: float = 0.95) -> float:
    """Return the upper end of the exact (Clopper-Pearson) one-sided interval of a rate."""
    return _bisect(num_hits, num_runs, 1.0 - confidence) if num_hits < num_runs else 1.0


def lower_bound(num_hits: int, num_runs: int, confidence: float = 0.95) -> float:
    """Return the lower end of the exact (Clopper-Pearson) one-sided interval of a rate."""
    return 1.0 - upper_bound(num_runs - num_hits, num_runs, confidence)


def _bisect(num_hits: int, num_runs: int, tail: float) -> float:
    """Return the rate at which `num_hits` or fewer of `num_runs` have probability `tail`."""
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

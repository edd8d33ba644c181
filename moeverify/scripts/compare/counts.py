"""Integers of a run that a wrong divisor may be, as far as the run itself distinguishes them."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median

from moeverify.results.checks import Kind
from moeverify.results.factor import Source
from moeverify.results.finding import Finding
from moeverify.results.observation import AmbiguousCount
from moeverify.results.operation import Scaled
from moeverify.scripts.compare.calls import calls_of
from moeverify.scripts.compare.entries import Comparer

RANKS, MICRO_BATCHES = "ranks", "micro-batches"
_NEAR, _FAR = 0.1, 0.3  # of logarithms of ratios: weights differ after the first wrong step


def list_sources(comparer: Comparer, step: int) -> list[Source]:
    """Return the numbers of ranks and of micro-batches of a step, without one that the run rules out.

    No gradient is averaged over ranks if each tensor is on one of them, as in a pipeline. If a step has
    another number of micro-batches, its gradients show which of two equal numbers the factor is.
    """
    run = comparer.actual
    ranks = Source(name=RANKS, size=run.world_size)
    batches = Source(name=MICRO_BATCHES, size=_count_micro_batches(comparer, step))
    holders = Counter(placed.name for placed in comparer.places.known.values())
    if run.world_size > 1 and set(holders.values()) == {1} and not comparer.places.unknown:
        return [batches]
    if ranks.size == batches.size > 1:
        for other in run.steps:
            number = _count_micro_batches(comparer, other)
            if number != batches.size and other in comparer.expected.steps:
                ratio = _measure_ratio(comparer, other)
                near = [each for each in (ranks.size, number) if abs(math.log(ratio / each)) < _NEAR]
                far = [each for each in (ranks.size, number) if abs(math.log(ratio / each)) > _FAR]
                if len(near) == len(far) == 1:
                    return [ranks] if near[0] == ranks.size else [batches]
    return [ranks, batches]


def note_ambiguous(finding: Finding, comparer: Comparer, step: int) -> Finding:
    """Return a finding with the way to separate equal numbers of ranks and micro-batches, if it needs one."""
    operation = None if finding.explanation is None else finding.explanation.operation
    parts = operation.contributions if isinstance(operation, Scaled) else ()
    if not any({RANKS, MICRO_BATCHES} <= set(part.factor.sources) for part in parts):
        return finding
    header = comparer.actual.ranks[0].header
    seen = AmbiguousCount(
        num_ranks=comparer.actual.world_size,
        num_micro_batches=_count_micro_batches(comparer, step),
        script=header.script,
    )
    return finding.model_copy(update={"observations": (*finding.observations, seen)})


def _count_micro_batches(comparer: Comparer, step: int) -> int:
    return sum(call.name == "backward" for call in calls_of(comparer.actual.ranks[0], step)) or 1


def _measure_ratio(comparer: Comparer, step: int) -> float:
    """Return the median ratio of the norms of this run's gradients and the expected ones; 1 if unknown."""
    ratios = []
    for rank in comparer.actual.ranks:
        for (number, own), placed in comparer.places.known.items():
            line = rank.values.get((step, Kind.GRADIENT, own)) if number == rank.rank else None
            whole = None if line is None else comparer.read_expected(step, Kind.GRADIENT, placed.name)
            local = None if line is None else comparer.read_actual(rank, line)
            if whole is None or local is None:
                continue
            expected, actual = float(placed.region.take(whole).norm()), float(local.norm())
            if expected > 0.0 and actual > 0.0:
                ratios.append(actual / expected)
    return median(ratios) if ratios else 1.0

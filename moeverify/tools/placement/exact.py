"""The exact solver: per layer, the smallest largest load, then the least traffic, then the fewest moves.

For even sources on one node the load is solved as a program over sets of replicas (`patterns.py`), which is
much faster. Everything else is a program over replicas on ranks (`program.py`). Each criterion keeps the
values that earlier criteria reached.

Notation: L MoE layers, E experts, R ranks, S slots per rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

import numpy as np

from moeverify.errors import MachineError
from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.load_trace import TokenLoad
from moeverify.tools.placement.marks import BoolArray
from moeverify.tools.placement.patterns import PatternSearch
from moeverify.tools.placement.program import LayerProgram, Limit
from moeverify.tools.placement.sharing import FloatArray, measure_traffic, share_load

Status = Literal["optimal", "time limit", "too large"]

MOST_BINARIES = 100_000
"""With more binaries in a layer, HiGHS takes minutes before its first bound."""

_SLACK = 1e-7  # relative tolerance of HiGHS


@dataclass(frozen=True)
class ExactAnswer:
    """Placements and lower bounds on their loads.

    Shapes: marks (L, E, R); bound (L), a load in token copies that no placement of the family undercuts.
    """

    marks: BoolArray = field(repr=False)
    bound: FloatArray = field(repr=False)
    statuses: tuple[Status, ...]


def solve_exactly(
    load: TokenLoad,
    cluster: Cluster,
    num_slots: int,
    incumbent: BoolArray,
    *,
    seconds: float,
    bound: FloatArray,
    current: BoolArray | None = None,
) -> ExactAnswer:
    """Return the best placement found within `seconds`, at least as good as `incumbent`.

    `seconds` covers all layers. Each layer gets an equal share of the time that remains at its turn. A
    layer whose incumbent reaches `bound` (L) is already optimal; only its traffic and moves are improved.

    Shapes: incumbent and current (L, E, R).

    Raises: MachineError when SciPy is not installed.
    """
    if find_spec("scipy") is None:
        raise MachineError("the exact solver needs SciPy, which is not installed; `pip install scipy`")
    ends = time.monotonic() + seconds
    marks, bounds, statuses = incumbent.copy(), bound.copy(), []
    for layer, copies in enumerate(load.copies):
        left = max(ends - time.monotonic(), 0.0) / (len(marks) - layer)
        search = _LayerSearch(copies, cluster, num_slots, marks[layer], load.is_even)
        statuses.append(search.run(left, bounds[layer], None if current is None else current[layer]))
        marks[layer] = search.best
        # With several nodes the program's bound holds only for hierarchical placements; others may be
        # better.
        if cluster.num_nodes == 1:
            bounds[layer] = min(max(bounds[layer], search.bound), search.largest)
    return ExactAnswer(marks, bounds, tuple(statuses))


class _LayerSearch:
    """The search for one layer; `best` (E, R) is never worse than the incumbent."""

    def __init__(
        self, copies: FloatArray, cluster: Cluster, num_slots: int, incumbent: BoolArray, is_even: bool
    ) -> None:
        self._copies = copies
        self._cluster = cluster
        self._num_slots = num_slots
        self._is_even = is_even
        self.best = incumbent
        self.largest = self._measure(incumbent)
        self.bound = 0.0
        self._program = LayerProgram(copies, cluster, num_slots, self.largest, is_even=is_even)

    def _measure(self, marks: BoolArray) -> float:
        return float(share_load(marks, self._copies, self._cluster).sum(0).max())

    def run(self, seconds: float, bound: float, current: BoolArray | None) -> Status:
        """Search for `seconds` and return the status."""
        ends = time.monotonic() + seconds
        self.bound = bound
        is_alike = self._is_even and self._cluster.num_nodes == 1
        is_optimal = self.largest <= bound * (1 + _SLACK)
        if is_alike:
            is_optimal = self._search_patterns(seconds, bound) or is_optimal
        if self._program.num_binaries > MOST_BINARIES:
            return "optimal" if is_optimal else "too large"
        self._program.build()
        if not is_optimal and not self._search_program(ends - time.monotonic()):
            return "time limit"
        self._reduce_further(min(ends - time.monotonic(), seconds / 4), current)
        return "optimal"

    def _search_patterns(self, seconds: float, bound: float) -> bool:
        """Search over sets of replicas for interchangeable ranks; return whether the best is optimal."""
        by_expert = self._copies.sum(1)
        search = PatternSearch(
            by_expert, self._cluster.num_ranks, self._num_slots, bound, self.largest, self.best
        )
        search.run(seconds)
        self.bound = max(self.bound, search.bound)
        if self._measure(search.marks) <= self.largest * (1 + _SLACK):
            self.best, self.largest = search.marks, self._measure(search.marks)
        return search.is_optimal

    def _search_program(self, seconds: float) -> bool:
        """Search with a variable for each replica on each rank; return whether the best is optimal."""
        if seconds <= 0:
            return False
        goal = self._program.largest_load()
        # With even sources, loads do not depend on rank names, so one order of the ranks suffices.
        limits = [self._limit_load(goal)]
        answer = self._program.minimize(goal, limits, seconds, is_ordered=self._is_even)
        self.bound = max(self.bound, self._program.to_copies(answer.bound))
        if answer.values is not None:
            self._take(self._program.read_marks(answer.values), self._measure)
        return answer.is_optimal

    def _reduce_further(self, seconds: float, current: BoolArray | None) -> None:
        """Reduce traffic, then moves, without increasing the largest load."""
        ends = time.monotonic() + seconds
        limits = [self._limit_load(self._program.largest_load())]
        for objective, measure in self._list_further(current):
            left = ends - time.monotonic()
            if left <= 0:
                return
            answer = self._program.minimize(objective, limits, left, is_ordered=False)
            if answer.values is None:
                return
            self._take(self._program.read_marks(answer.values), measure, keep_load=True)
            if not answer.is_optimal:
                return
            reached = float(objective @ answer.values)
            limits.append(Limit(objective, reached + _SLACK * max(1.0, abs(reached))))

    def _limit_load(self, goal: FloatArray) -> Limit:
        return Limit(goal, self._program.to_units(self.largest) * (1 + _SLACK))

    def _take(
        self, marks: BoolArray, measure: Callable[[BoolArray], float], *, keep_load: bool = False
    ) -> None:
        """Accept a placement that improves `measure`; with `keep_load`, the largest load must not grow."""
        if keep_load and self._measure(marks) > self.largest * (1 + 2 * _SLACK):
            return
        if measure(marks) < measure(self.best):
            self.best = marks
            self.largest = min(self.largest, self._measure(marks)) if keep_load else self._measure(marks)

    def _list_further(
        self, current: BoolArray | None
    ) -> list[tuple[FloatArray, Callable[[BoolArray], float]]]:
        """Return the objectives after the largest load, each with a function that measures a placement."""
        program = self._program
        result: list[tuple[FloatArray, Callable[[BoolArray], float]]] = []
        if self._cluster.num_nodes > 1:
            result.append((program.off_node(), lambda marks: float(self._find_traffic(marks)[1])))
        result.append((program.off_rank(), lambda marks: float(self._find_traffic(marks)[0])))
        if current is not None:
            result.append((program.arrivals(current), lambda marks: float(np.sum(marks & ~current))))
        return result

    def _find_traffic(self, marks: BoolArray) -> tuple[np.float64, np.float64]:
        traffic = measure_traffic(marks, self._copies, self._cluster)
        return np.float64(traffic.off_rank), np.float64(traffic.off_node)

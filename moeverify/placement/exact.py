"""The exact solver: layer by layer, the least largest load, then the least traffic, then the fewest moves.

With even sources on one node, the load is a program over sets of replicas (`patterns.py`), which is solved far
sooner. All else is one over replicas on ranks (`program.py`); each criterion keeps what the ones before have reached.

Letters: L MoE layers, E experts, R ranks, S slots a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

import numpy as np

from moeverify.errors import MachineError
from moeverify.placement.cluster import Cluster
from moeverify.placement.load_trace import TokenLoad
from moeverify.placement.marks import BoolArray
from moeverify.placement.patterns import PatternSearch
from moeverify.placement.program import Limit, Program
from moeverify.placement.sharing import FloatArray, measure_traffic, share_load

Status = Literal["optimal", "time limit", "too large"]

MOST_BINARIES = 100_000
"""With more of them in a layer, HiGHS spends minutes before its first bound."""

_SLACK = 1e-7  # relative: what HiGHS takes for equal


@dataclass(frozen=True)
class ExactAnswer:
    """Placements and how good they can get at most.

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
    """Return the best placement that is found in `seconds` for all layers together, at least as good as `incumbent`.

    A layer gets an equal part of the time that is left when its turn comes. One whose incumbent reaches
    `bound` (L) is optimal already; only its traffic and moves are still looked at.

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
        # With several nodes the program's bound is that of hierarchical placements, and others may be better.
        if cluster.num_nodes == 1:
            bounds[layer] = min(max(bounds[layer], search.bound), search.largest)
    return ExactAnswer(marks, bounds, tuple(statuses))


class _LayerSearch:
    """The search for one layer; `best` (E, R) is never worse than what it starts with."""

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
        self._program = Program(copies, cluster, num_slots, self.largest, is_even=is_even)

    def _measure(self, marks: BoolArray) -> float:
        return float(share_load(marks, self._copies, self._cluster).sum(0).max())

    def run(self, seconds: float, bound: float, current: BoolArray | None) -> Status:
        """Search for `seconds`; return how it ended."""
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
        """Search among sets of replicas for ranks that are alike; return whether the best is the optimum."""
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
        """Search with a variable for each replica on each rank; return whether the best is the optimum."""
        if seconds <= 0:
            return False
        goal = self._program.largest_load()
        # Names of ranks do not matter to loads with even sources, and one order of them is enough.
        limits = [self._limit_load(goal)]
        answer = self._program.minimize(goal, limits, seconds, is_ordered=self._is_even)
        self.bound = max(self.bound, self._program.to_copies(answer.bound))
        if answer.values is not None:
            self._take(self._program.read_marks(answer.values), self._measure)
        return answer.is_optimal

    def _reduce_further(self, seconds: float, current: BoolArray | None) -> None:
        """Reduce traffic, then moves, without a larger load."""
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
        """Take a placement that is better by a measure, and whose largest load is not above that of the best."""
        if keep_load and self._measure(marks) > self.largest * (1 + 2 * _SLACK):
            return
        if measure(marks) < measure(self.best):
            self.best = marks
            self.largest = min(self.largest, self._measure(marks)) if keep_load else self._measure(marks)

    def _list_further(
        self, current: BoolArray | None
    ) -> list[tuple[FloatArray, Callable[[BoolArray], float]]]:
        """Return what to minimize after the largest load, each with what it is for a placement."""
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

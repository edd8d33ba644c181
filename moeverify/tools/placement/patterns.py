"""The pattern program of the exact solver: sets of replicas that fit on a rank, for even sources on one node.

Ranks are interchangeable here, and the load of a replica follows from the number of replicas of its expert.
A pattern is a set of replicas of different experts that fits into the slots of a rank and stays below a
limit. The number of uses of each pattern, R in total, is an integer program without the R! symmetric
permutations of ranks.

A limit close to the mean allows few patterns: if one rank is below the limit, the other R - 1 must take the
difference. The search therefore starts at the bound and goes up. Every refuted limit is a new bound, and
the first feasible one yields the placement.

Notation: E experts, R ranks, S slots per rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moeverify.tools.placement.marks import BoolArray
from moeverify.tools.placement.sharing import FloatArray, IntArray

MOST_PATTERNS = 60_000
"""With more patterns HiGHS spends minutes on a relaxation."""

_MOST_STEPS = 50 * MOST_PATTERNS
_STEPS_A_LOOK = 4096  # steps between two checks of the clock
_MOST_SLOTS = 256  # of a rank: patterns are enumerated by a recursion with one slot per level
_FIRST_PART = 1 / 64  # of the way from the bound to the best placement, for the first limit
_CLOSE = 1e-7  # relative: loads that count as equal


class _Replica(NamedTuple):
    """One of `number` replicas of an expert, and its load."""

    expert: int
    number: int
    size: float


@dataclass
class PatternSearch:
    """Search state of one layer: a lower `bound`, and `marks` (E, R) that reach `largest`.

    Shapes: load (E).
    """

    load: FloatArray = field(repr=False)
    num_ranks: int
    num_slots: int
    bound: float
    largest: float
    marks: BoolArray = field(repr=False)
    is_optimal: bool = False

    def run(self, seconds: float) -> None:
        """Search for the optimum, then take the optimal placement with the least traffic."""
        ends = time.monotonic() + seconds
        part = _FIRST_PART
        self.is_optimal = self.largest <= self.bound * (1 + _CLOSE)
        while not self.is_optimal:
            left = ends - time.monotonic()
            limit = self.bound + part * (self.largest - self.bound)
            is_last = part >= 1 or self.largest - limit <= self.largest * _CLOSE
            if is_last:
                limit = self.largest * (1 - _CLOSE)
            if left <= 0 or limit <= 0:
                self.is_optimal = limit <= 0
                return
            verdict = self._try(limit, ends)
            if verdict is None:
                return
            if verdict:
                part = min(part, _FIRST_PART)  # the interval is shorter now, and everything below was refuted
            else:
                self.bound = max(self.bound, limit)
                self.is_optimal = is_last
                part = min(part * 4, 1.0)
        self._reduce_traffic(min(ends, time.monotonic() + seconds / 4))

    def _try(self, limit: float, ends: float) -> bool | None:
        """Return whether a placement below a limit exists, and take it; None if that is undecided."""
        program = self._build(limit, ends)
        if program is None:
            return None
        if not program.patterns:
            return False
        values, is_proved = program.solve(np.zeros(program.num_variables), ends)
        if values is None:
            return False if is_proved else None
        self._take(program.read_marks(values, self.load))
        return True

    def _take(self, marks: BoolArray) -> None:
        self.marks = marks
        self.largest = float((marks * (self.load / marks.sum(1))[:, None]).sum(0).max())

    def _reduce_traffic(self, ends: float) -> None:
        """Take the optimal placement that keeps the most copies on their rank: 1/R of them per replica."""
        program = self._build(self.largest * (1 + _CLOSE), ends)
        if program is None:
            return
        objective = np.zeros(program.num_variables)
        objective[len(program.patterns) :] = [
            -each.number * self.load[each.expert] for each in program.replicas
        ]
        values, _ = program.solve(objective / max(self.load.sum(), 1e-300), ends)
        if values is not None:
            marks = program.read_marks(values, self.load)
            if (marks * self.load[:, None]).sum() > (self.marks * self.load[:, None]).sum():
                self._take(marks)

    def _build(self, limit: float, ends: float) -> _PatternProgram | None:
        """Return the program of a limit, or None if it is too large or the time `ends` first."""
        fewest = np.maximum(np.ceil(self.load / limit * (1 - 1e-9)), 1).astype(np.int64)
        free = self.num_ranks * self.num_slots - int(fewest.sum())
        if free < 0 or fewest.max() > self.num_ranks:
            return _PatternProgram([], [], self.num_ranks)
        most = np.minimum(fewest + free, self.num_ranks)
        # If one rank is below the limit, all others together must be above the mean by the same amount.
        least = max(float(self.load.sum()) - (self.num_ranks - 1) * limit, 0.0) - limit * 1e-9
        replicas = _list_replicas(self.load, fewest, most)
        patterns = _list_patterns(replicas, self.num_slots, least, limit * (1 + 1e-12), ends)
        return None if patterns is None else _PatternProgram(replicas, patterns, self.num_ranks)


def _list_replicas(load: FloatArray, fewest: IntArray, most: IntArray) -> list[_Replica]:
    """Return the possible replicas, grouped by expert, experts with the largest replicas first."""
    order = np.argsort(-load / fewest, kind="stable")
    return [
        _Replica(int(expert), number, float(load[expert]) / number)
        for expert in order
        for number in range(int(fewest[expert]), int(most[expert]) + 1)
    ]


def _list_patterns(
    replicas: list[_Replica], num_slots: int, least: float, limit: float, ends: float
) -> list[tuple[int, ...]] | None:
    """Return the sets of replica positions with loads in [`least`, `limit`], or None if it takes too long."""
    starts = [0] + [n for n, (a, b) in enumerate(pairwise(replicas), 1) if a.expert != b.expert]
    starts.append(len(replicas))
    largest = [replicas[start].size for start in starts[:-1]]
    # sums[i + m] - sums[i]: maximum load of m replicas of the experts from position i on.
    sums = np.concatenate([[0.0], np.cumsum(largest)])
    num_experts = len(largest)
    found: list[tuple[int, ...]] = []
    steps = 0

    def extend(first: int, chosen: tuple[int, ...], load: float) -> bool:
        nonlocal steps
        if chosen and load >= least:
            found.append(chosen)
        left = num_slots - len(chosen)
        for expert in range(first, num_experts if left else first):
            if load + sums[min(expert + left, num_experts)] - sums[expert] < least:
                break
            for position in range(starts[expert], starts[expert + 1]):
                steps += 1
                if steps % _STEPS_A_LOOK == 0 and (steps > _MOST_STEPS or time.monotonic() > ends):
                    return False
                size = load + replicas[position].size
                if size <= limit and not extend(expert + 1, (*chosen, position), size):
                    return False
        return len(found) <= MOST_PATTERNS

    return found if num_slots <= _MOST_SLOTS and extend(0, (), 0.0) else None


@dataclass
class _PatternProgram:
    """Integer program: uses of each pattern, then whether an expert has each number of replicas."""

    replicas: list[_Replica]
    patterns: list[tuple[int, ...]]
    num_ranks: int

    @property
    def num_variables(self) -> int:
        return len(self.patterns) + len(self.replicas)

    def solve(self, objective: FloatArray, ends: float) -> tuple[FloatArray | None, bool]:
        """Return values of the variables, or None, and whether the result is proved."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        num_patterns, num_replicas = len(self.patterns), len(self.replicas)
        experts = sorted({each.expert for each in self.replicas})
        entries: list[tuple[int, int, float]] = []
        for column, pattern in enumerate(self.patterns):
            # Each replica occurs as often as its number says, if its expert has that many; R patterns in
            # total.
            entries += [(position, column, 1.0) for position in pattern]
            entries.append((num_replicas + len(experts), column, 1.0))
        for position, each in enumerate(self.replicas):
            entries.append((position, num_patterns + position, -float(each.number)))
            entries.append((num_replicas + experts.index(each.expert), num_patterns + position, 1.0))
        rows, columns, values = zip(*entries, strict=True)
        sums = np.concatenate([np.zeros(num_replicas), np.ones(len(experts)), [self.num_ranks]])
        matrix = coo_array((values, (rows, columns)), shape=(len(sums), self.num_variables)).tocsr()
        most = np.concatenate([np.full(num_patterns, self.num_ranks), np.ones(num_replicas)])
        result = milp(
            objective,
            integrality=np.ones(self.num_variables),
            bounds=Bounds(0, most),
            constraints=[LinearConstraint(matrix, sums, sums)],
            options={"time_limit": max(ends - time.monotonic(), 0.01)},
        )
        return result.x, result.status in (0, 2)

    def read_marks(self, values: FloatArray, load: FloatArray) -> BoolArray:
        """Return the placement (E, R), with one rank for each use of a pattern."""
        marks = np.zeros((len(load), self.num_ranks), dtype=np.bool_)
        uses = np.rint(values[: len(self.patterns)]).astype(np.int64)
        for rank, pattern in enumerate(np.repeat(np.arange(len(self.patterns)), uses)):
            marks[[self.replicas[position].expert for position in self.patterns[pattern]], rank] = True
        return marks

"""Local search on one layer: step by step to a more even placement, with the exact shares of each step.

A step moves, copies, exchanges or drops one expert of the heaviest rank. Loads follow the sharing rule, so
sources and nodes count. Steps are rated by the load above a goal that they remove for each expert sent to
another rank.

Notation: E experts, R ranks, S slots per rank, A experts on the heaviest rank, C candidate changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.marks import BoolArray
from moeverify.tools.placement.sharing import FloatArray, IntArray, share_load

_DROP_COST = 0.25  # of a send: dropping a replica costs nothing now, but it may have to be copied again
_LEAST_GAIN = 1e-9


class State(NamedTuple):
    """An intermediate placement: marks (E, R), and its largest load."""

    marks: BoolArray
    largest: float


class _Changes(NamedTuple):
    """Candidate changes: up to two experts each, their new rows of marks (C, R), and experts sent (C).

    The second expert is -1 if there is none.
    """

    first: IntArray
    first_marks: BoolArray
    second: IntArray
    second_marks: BoolArray
    sends: FloatArray


class _Layer:
    """State of a layer during the search: marks and shares (E, R), loads (R)."""

    def __init__(self, marks: BoolArray, copies: FloatArray, cluster: Cluster, num_slots: int) -> None:
        self.marks = marks.copy()
        self.copies = np.ascontiguousarray(np.broadcast_to(copies, marks.shape))
        self.cluster = cluster
        self.num_slots = num_slots
        self.shares = share_load(self.marks, self.copies, cluster)
        self.loads = self.shares.sum(0)

    def share(self, experts: IntArray, marks: BoolArray) -> FloatArray:
        """Return the load (C, R) that each rank would get from one expert of each candidate change.

        `experts` (C) has these experts, and `marks` (C, R) the ranks that would hold them.
        """
        return share_load(marks, self.copies[experts], self.cluster)

    def apply(self, expert: int, row: BoolArray) -> None:
        """Set the ranks of an expert."""
        self.marks[expert] = row
        self.shares[expert] = share_load(row[None], self.copies[expert][None], self.cluster)[0]
        self.loads = self.shares.sum(0)

    def list_changes(self) -> _Changes:
        """Return the changes that take load from the heaviest rank."""
        heavy = int(self.loads.argmax())
        held = np.flatnonzero(self.marks[:, heavy])
        parts = [self._list_drops(held, heavy)]
        # Every expert there (A) with every rank that does not hold it: pairs (a, r).
        which, ranks = np.nonzero(~self.marks[held])
        experts = held[which]
        if len(experts):
            copied = self.marks[experts]
            copied[np.arange(len(experts)), ranks] = True
            moved = copied.copy()
            moved[:, heavy] = False
            parts.append(self._list_into_free(experts, ranks, copied, moved, len(held) > 1))
            parts.append(self._list_into_replica(experts, ranks, copied, moved, len(held) > 1))
            parts.append(self._list_exchanges(experts, ranks, moved, heavy))
        return _Changes(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _list_drops(self, held: IntArray, heavy: int) -> _Changes:
        """Return the changes in which the heaviest rank drops a replica that other ranks hold too."""
        experts = held[self.marks[held].sum(1) > 1] if len(held) > 1 else held[:0]
        rows = self.marks[experts]
        rows[:, heavy] = False
        return _alone(experts, rows, _DROP_COST)

    def _list_into_free(
        self, experts: IntArray, ranks: IntArray, copied: BoolArray, moved: BoolArray, may_move: bool
    ) -> _Changes:
        """Return copies and moves into free slots."""
        is_free = (self.marks.sum(0) < self.num_slots)[ranks]
        rows = [copied[is_free], moved[is_free]] if may_move else [copied[is_free]]
        return _alone(np.tile(experts[is_free], len(rows)), np.concatenate(rows), 1.0)

    def _list_into_replica(
        self, experts: IntArray, ranks: IntArray, copied: BoolArray, moved: BoolArray, may_move: bool
    ) -> _Changes:
        """Return copies and moves that replace the rank's lightest replica that others hold too."""
        load = np.where(self.marks & (self.marks.sum(1) > 1)[:, None], self.shares, np.inf)
        victims = load.argmin(0)
        has_one = np.isfinite(load.min(0))[ranks]
        experts, ranks = experts[has_one], ranks[has_one]
        victim_rows = self.marks[victims[ranks]]
        victim_rows[np.arange(len(ranks)), ranks] = False
        rows = [copied[has_one], moved[has_one]] if may_move else [copied[has_one]]
        number = len(rows)
        return _Changes(
            np.tile(experts, number),
            np.concatenate(rows),
            np.tile(victims[ranks], number),
            np.tile(victim_rows, (number, 1)),
            np.full(number * len(ranks), 1.0),
        )

    def _list_exchanges(self, experts: IntArray, ranks: IntArray, moved: BoolArray, heavy: int) -> _Changes:
        """Return exchanges of an expert with the one of the other rank that best equalizes both loads."""
        half = (self.loads[heavy] - self.loads[ranks]) / 2
        may_come = self.marks[:, ranks] & ~self.marks[:, heavy][:, None]
        difference = self.shares[experts, heavy] - self.shares[:, ranks]
        distance = np.where(may_come, np.abs(difference - half), np.inf)
        others = distance.argmin(0)
        has_one = np.isfinite(distance.min(0))
        experts, ranks, others = experts[has_one], ranks[has_one], others[has_one]
        rows = self.marks[others]
        rows[np.arange(len(ranks)), ranks] = False
        rows[:, heavy] = True
        return _Changes(experts, moved[has_one], others, rows, np.full(len(ranks), 2.0))

    def rate(self, changes: _Changes) -> FloatArray:
        """Return the loads (C, R) after each change."""
        result: FloatArray = (
            self.loads + self.share(changes.first, changes.first_marks) - self.shares[changes.first]
        )
        is_double = changes.second >= 0
        second = changes.second[is_double]
        result[is_double] += self.share(second, changes.second_marks[is_double]) - self.shares[second]
        return result


def _alone(experts: IntArray, rows: BoolArray, sends: float) -> _Changes:
    none = np.full(len(experts), -1)
    return _Changes(experts, rows, none, np.zeros_like(rows), np.full(len(experts), sends))


def search(
    marks: BoolArray, copies: FloatArray, cluster: Cluster, num_slots: int, *, goal: float, most_steps: int
) -> Iterator[State]:
    """Yield placements of one layer, step by step, until the largest load is at `goal` or no step helps.

    Shapes: marks and copies (E, R).
    """
    layer = _Layer(marks, copies, cluster, num_slots)
    for _ in range(most_steps):
        if layer.loads.max() <= goal * (1 + _LEAST_GAIN):
            return
        changes = layer.list_changes()
        if not len(changes.first):
            return
        before = _sum_excess(layer.loads, goal)
        gains = before - _sum_excess(layer.rate(changes), goal)
        # Gain per cost; a change without gain is never taken, however little it costs.
        best = int(np.where(gains > before * _LEAST_GAIN, gains / changes.sends, -np.inf).argmax())
        if gains[best] <= before * _LEAST_GAIN:
            return
        layer.apply(int(changes.first[best]), changes.first_marks[best])
        if changes.second[best] >= 0:
            layer.apply(int(changes.second[best]), changes.second_marks[best])
        yield State(layer.marks.copy(), float(layer.loads.max()))


def _sum_excess(loads: FloatArray, goal: float) -> FloatArray:
    """Return the sum over ranks of the squared load above the goal, which weights the heaviest most."""
    excess: FloatArray = (np.maximum(loads - goal, 0.0) ** 2).sum(-1)
    return excess

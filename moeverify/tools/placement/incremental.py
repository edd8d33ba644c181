"""Improvement of the current placement with few experts sent: the fewest for most of the gain, or a budget.

For each layer, candidate placements trade gain against experts sent. They are steps of a local search from
the current placement towards several goals, and the placement found from scratch. The ranks of the latter
are permuted to keep most experts in place. A dynamic program picks one candidate per layer.

Notation: L MoE layers, E experts, R ranks, S slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.load_trace import TokenLoad
from moeverify.tools.placement.local_search import search
from moeverify.tools.placement.marks import BoolArray
from moeverify.tools.placement.relabel import move_to_current
from moeverify.tools.placement.sharing import FloatArray, IntArray, share_load

GAIN_SHARE = 0.95
"""The fraction of the possible gain that is worth sending experts for; the rest often costs as much again."""

# Fractions of a layer's gain that the local search aims for, each from the current placement.
_GOALS = (0.6, 0.95, 1.0)


class _Point(NamedTuple):
    """One placement of a layer: experts sent, reduction of the largest load in token copies, packed marks."""

    sends: int
    gain: float
    packed: np.typing.NDArray[np.uint8]


@dataclass(frozen=True)
class Improvement:
    """A better placement: marks (L, E, R), experts sent, and its fraction of the best known gain."""

    marks: BoolArray = field(repr=False)
    sends: int
    gain_share: float
    best_sends: int


def improve(
    current: BoolArray,
    best: BoolArray,
    load: TokenLoad,
    cluster: Cluster,
    num_slots: int,
    *,
    max_moves: int | None = None,
) -> Improvement:
    """Return the placement that sends the fewest experts for `GAIN_SHARE` of the gain of `best`.

    The gain is the reduction of the largest loads, summed over layers. `max_moves` limits the number of
    experts sent over all layers. If that is too few for `GAIN_SHARE`, the gain within the limit is
    maximized.

    Shapes: current and best (L, E, R); current within S slots per rank.
    """
    best = move_to_current(best, current, cluster)
    before = _find_largest(current, load, cluster)
    possible = np.maximum(before - _find_largest(best, load, cluster), 0.0)
    frontiers = [
        _trace_frontier(
            current[row], best[row], load.copies[row], cluster, num_slots, possible[row], max_moves
        )
        for row in range(len(current))
    ]
    # A placement found by the local search may be better than `best`.
    total = sum(max(point.gain for point in frontier) for frontier in frontiers)
    chosen = _choose(frontiers, total, max_moves)
    shape = current.shape[1:]
    marks = np.stack([_unpack(frontiers[row][point].packed, shape) for row, point in enumerate(chosen)])
    gained = sum(frontiers[row][point].gain for row, point in enumerate(chosen))
    return Improvement(
        marks,
        int(np.sum(marks & ~current)),
        gained / total if total > 0 else 1.0,
        int(np.sum(best & ~current)),
    )


def _find_largest(marks: BoolArray, load: TokenLoad, cluster: Cluster) -> FloatArray:
    largest: FloatArray = share_load(marks, load.copies, cluster).sum(1).max(1)
    return largest


def _trace_frontier(
    current: BoolArray,
    best: BoolArray,
    copies: FloatArray,
    cluster: Cluster,
    num_slots: int,
    possible: float,
    max_moves: int | None,
) -> list[_Point]:
    """Return placements of one layer with increasing gain and experts sent, the current one first."""
    before = float(share_load(current, copies, cluster).sum(0).max())
    points = [_Point(0, 0.0, np.packbits(current))]
    if possible > 0:
        points.append(_Point(int(np.sum(best & ~current)), possible, np.packbits(best)))
    most_steps = 2 * int(np.sum(best & ~current)) + 8 if possible > 0 else 0
    for part in _GOALS:
        goal = before - part * possible
        for state in search(current, copies, cluster, num_slots, goal=goal, most_steps=most_steps):
            points.append(
                _Point(int(np.sum(state.marks & ~current)), before - state.largest, np.packbits(state.marks))
            )
    points.sort(key=lambda point: (point.sends, -point.gain))
    frontier = [points[0]]
    for point in points[1:]:
        if point.gain > frontier[-1].gain and (max_moves is None or point.sends <= max_moves):
            frontier.append(point)
    return frontier


def _choose(frontiers: list[list[_Point]], total: float, max_moves: int | None) -> list[int]:
    """Return the point to take for each layer: fewest sends for the share of the gain, or the most gain.

    gains[m] is the largest gain of the layers so far with at most m sends.
    """
    most = sum(frontier[-1].sends for frontier in frontiers)
    most = most if max_moves is None else min(most, max_moves)
    gains = np.zeros(most + 1)
    taken: list[IntArray] = []
    for frontier in frontiers:
        after = np.full(most + 1, -np.inf)
        which = np.zeros(most + 1, dtype=np.int64)
        for position, point in enumerate(frontier):
            if point.sends > most:
                break
            value = gains[: most + 1 - point.sends] + point.gain
            is_better = value > after[point.sends :]
            after[point.sends :][is_better] = value[is_better]
            which[point.sends :][is_better] = position
        gains = after
        taken.append(which)
    enough = np.flatnonzero(gains >= GAIN_SHARE * total * (1 - 1e-12))
    sends = int(enough[0]) if len(enough) else int(np.flatnonzero(gains >= gains[-1])[0])
    chosen: list[int] = []
    for frontier, which in zip(reversed(frontiers), reversed(taken), strict=True):
        position = int(which[sends])
        chosen.append(position)
        sends -= frontier[position].sends
    return chosen[::-1]


def _unpack(packed: np.typing.NDArray[np.uint8], shape: tuple[int, ...]) -> BoolArray:
    return np.unpackbits(packed, count=int(np.prod(shape))).astype(np.bool_).reshape(shape)

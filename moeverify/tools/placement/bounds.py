"""Lower bounds on the largest rank load of any placement, computed without a solver.

Notation: L MoE layers, E experts, R ranks, S slots per rank.
"""

from __future__ import annotations

import numpy as np

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.load_trace import TokenLoad
from moeverify.tools.placement.packing import count_replicas
from moeverify.tools.placement.sharing import FloatArray

_BISECTIONS = 40


def bound_load(load: TokenLoad, cluster: Cluster, num_slots: int) -> FloatArray:
    """Return a lower bound (L) on the load of the heaviest rank, for any placement with S slots per rank.

    The bound is the maximum of:
    - the mean load of a rank;
    - the smallest possible largest replica: with k replicas of an expert, one of them gets at least 1/k of
      its copies, however they share;
    - for even sources on one node, a bound from counting replicas that are too large to share a rank.
    """
    by_expert = load.by_expert
    mean = by_expert.sum(1) / cluster.num_ranks
    total_slots = cluster.num_ranks * num_slots
    counts = count_replicas(by_expert, total_slots, cluster.num_ranks)
    bound: FloatArray = np.maximum(mean, (by_expert / counts).max(1))
    if total_slots == by_expert.shape[1]:
        # Every slot holds a different expert, so the heaviest expert shares its rank with S - 1 others.
        ordered = np.sort(by_expert, axis=1)
        bound = np.maximum(bound, ordered[:, -1] + ordered[:, : num_slots - 1].sum(1))
    if load.is_even and cluster.num_nodes == 1:
        highest = by_expert.max(1)
        bound = np.array(
            [
                _bisect(layer, cluster.num_ranks, num_slots, low, high)
                for layer, low, high in zip(by_expert, bound, highest, strict=True)
            ]
        )
    return bound


def _bisect(load: FloatArray, num_ranks: int, num_slots: int, low: float, high: float) -> float:
    """Return the largest load that is proved infeasible, or `low`, for the experts (E) of one layer."""
    if high <= low or _may_fit(load, num_ranks, num_slots, low):
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _may_fit(load, num_ranks, num_slots, middle):
            high = middle
        else:
            low = middle
    return low


def _may_fit(load: FloatArray, num_ranks: int, num_slots: int, limit: float) -> bool:
    """Return False if no placement keeps every rank at `limit` or below.

    An expert needs at least ceil(load / limit) replicas. Two replicas above limit / 2 cannot share a rank,
    so there are at most R of them. An expert needs ceil(2 load / limit) replicas to have only smaller ones.
    Choosing the experts to split that far is a knapsack problem, and its fractional relaxation never
    rejects a feasible placement.
    """
    fewest = np.maximum(np.ceil(load / limit * (1 - 1e-9)), 1)
    free = num_ranks * num_slots - fewest.sum()
    if free < 0 or (fewest > num_ranks).any():
        return False
    is_large = load / fewest > limit / 2 * (1 + 1e-9)
    excess = fewest[is_large].sum() - num_ranks
    if excess <= 0:
        return True
    cost = np.ceil(2 * load[is_large] / limit * (1 - 1e-9)) - fewest[is_large]
    relief = fewest[is_large]
    order = np.argsort(cost / relief, kind="stable")
    spent = np.cumsum(cost[order])
    whole = int(np.searchsorted(spent, free, side="right"))
    gained = relief[order][:whole].sum()
    if whole < len(order):
        left = free - (spent[whole - 1] if whole else 0)
        gained += relief[order][whole] * left / cost[order][whole]
    return bool(gained >= excess - 1e-6)

"""Lower bounds on the largest rank's load that hold for every placement, without solving anything.

Letters: L MoE layers, E experts, R ranks, S slots a rank.
"""

from __future__ import annotations

import numpy as np

from moeverify.placement.cluster import Cluster
from moeverify.placement.load_trace import TokenLoad
from moeverify.placement.packing import count_replicas
from moeverify.placement.sharing import FloatArray

_BISECTIONS = 40


def bound_load(load: TokenLoad, cluster: Cluster, num_slots: int) -> FloatArray:
    """Return a load (L) that the heaviest rank has at least, under any placement with S slots a rank.

    The larger of three: the mean; the smallest possible largest replica (some replica of an expert with k
    of them gets a k-th or more, however they share); and, for even sources on one node, a bound from counting
    replicas that are too large to meet each other on a rank.
    """
    by_expert = load.by_expert
    mean = by_expert.sum(1) / cluster.num_ranks
    total_slots = cluster.num_ranks * num_slots
    counts = count_replicas(by_expert, total_slots, cluster.num_ranks)
    bound: FloatArray = np.maximum(mean, (by_expert / counts).max(1))
    if total_slots == by_expert.shape[1]:
        # Every slot is taken, and by an expert of its own: the heaviest one shares its rank with S - 1 others.
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
    """Return the largest load that is known to be too small, or `low`, for the experts (E) of one layer."""
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
    """Return False when no placement keeps every rank at `limit` or below.

    An expert needs ceil(load / limit) replicas at least. A replica over limit / 2 meets no other such one, so
    that there are at most R of them; to have only smaller ones an expert needs ceil(2 load / limit). Which
    experts to divide so far is a knapsack, and its relaxation to fractions can only be too kind.
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

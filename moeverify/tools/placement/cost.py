"""The cost of a placement under a load: heaviest rank of each layer, traffic, replicas; and lower bounds.

Notation: L MoE layers, E experts, R ranks, S slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.load_trace import LoadTrace, TokenLoad, iterate_steps
from moeverify.tools.placement.marks import BoolArray
from moeverify.tools.placement.packing import count_replicas
from moeverify.tools.placement.sharing import FloatArray, measure_traffic, share_load


@dataclass(frozen=True)
class Cost:
    """The cost of a placement under a load, in token copies.

    `loads` (L, R) is the load of each rank. `off_rank` and `off_node` are the fractions of all copies that
    leave their rank and their node. `num_replicas` counts the replicas beyond the first of each expert,
    over all layers; the gradients of each replica must be reduced.
    """

    loads: FloatArray = field(repr=False)
    off_rank: float
    off_node: float
    num_replicas: int

    @property
    def largest(self) -> FloatArray:
        """Return the load (L) of each layer's heaviest rank, which all other ranks wait for."""
        result: FloatArray = self.loads.max(1)
        return result

    @property
    def mean(self) -> FloatArray:
        """Return the mean load (L) of each layer's ranks."""
        result: FloatArray = self.loads.mean(1)
        return result

    @property
    def balancedness(self) -> float:
        """Return mean over largest load, each summed over layers.

        The value is 1 for even loads and 1 / R for everything on one rank.
        """
        largest = float(self.largest.sum())
        return float(self.mean.sum()) / largest if largest > 0 else 1.0


def measure_cost(marks: BoolArray, load: TokenLoad, cluster: Cluster) -> Cost:
    """Return the cost of a placement, marks (L, E, R), under a load."""
    traffic = measure_traffic(marks, load.copies, cluster)
    total = max(float(load.copies.sum()), 1e-300)
    return Cost(
        share_load(marks, load.copies, cluster).sum(1),
        float(traffic.off_rank.sum()) / total,
        float(traffic.off_node.sum()) / total,
        int(marks.sum() - marks.shape[0] * marks.shape[1]),
    )


def measure_steps(marks: BoolArray, trace: LoadTrace, cluster: Cluster) -> float:
    """Return the balancedness of a placement, evaluated per step and summed over layers and steps.

    It is at most the balancedness of the summed load, because loads that are even in the sum may be uneven
    in each step.
    """
    mean = largest = 0.0
    for load in iterate_steps(trace, cluster):
        loads = share_load(marks, load.copies, cluster).sum(1)
        mean += float(loads.mean(1).sum())
        largest += float(loads.max(1).sum())
    return mean / largest if largest > 0 else 1.0


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

"""The cost of a placement under a load: the heaviest rank of each layer, traffic, and replicas.

Notation: L MoE layers, E experts, R ranks, S slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.load_trace import LoadTrace, TokenLoad, iterate_steps
from moeverify.tools.placement.marks import BoolArray
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

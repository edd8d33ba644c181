"""The ranks that experts are placed on, and their nodes."""

from __future__ import annotations

from dataclasses import dataclass

from moeverify.errors import CaseError, Problem

MOST_RANKS = 1 << 20
"""Far above every job."""


@dataclass(frozen=True)
class Cluster:
    """`num_ranks` ranks on `num_nodes` nodes; consecutive ranks share a node.

    Raises: CaseError when there are no ranks or nodes, or when ranks do not divide evenly among nodes.
    """

    num_ranks: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.num_ranks <= MOST_RANKS:
            message = f"expected 1 to {MOST_RANKS} ranks, got {self.num_ranks}"
            problems.append(Problem(message, path="ranks"))
        if self.num_nodes < 1:
            problems.append(Problem(f"expected at least 1 node, got {self.num_nodes}", path="nodes"))
        if not problems and self.num_ranks % self.num_nodes:
            problems.append(
                Problem(
                    f"{self.num_ranks} ranks do not divide evenly among {self.num_nodes} nodes",
                    path="nodes",
                    remedy="give a number of nodes that divides the number of ranks",
                )
            )
        if problems:
            raise CaseError(problems)

    @classmethod
    def of_nodes(cls, num_ranks: int, ranks_per_node: int | None) -> Cluster:
        """Return the cluster with nodes of this size, or with one node.

        Raises: CaseError when a node would not be full, or as for the cluster itself.
        """
        size = ranks_per_node or num_ranks
        if num_ranks % size:
            message = f"{num_ranks} ranks do not fill nodes of {size}"
            remedy = "give a divisor of the number of ranks"
            raise CaseError([Problem(message, path="--ranks-per-node", remedy=remedy)])
        return cls(num_ranks, num_ranks // size)

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks of a node."""
        return self.num_ranks // self.num_nodes

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.ranks_per_node

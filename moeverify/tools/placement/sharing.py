"""The sharing rule for token copies of replicated experts, used by solver, cost report and dispatcher.

A token copy (one token for one of its k experts) goes to the nearest replica of its expert: on the token's
rank, else on the same node, else anywhere. Equally near replicas share evenly.

Notation: L MoE layers, E experts, R ranks, N nodes. "..." denotes any leading dims.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.marks import BoolArray

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class RemoteCopies(NamedTuple):
    """Token copies (...) that leave their rank, and among them those that leave their node."""

    off_rank: FloatArray
    off_node: FloatArray


def find_nearest(marks: BoolArray, cluster: Cluster) -> BoolArray:
    """Return the replicas that a source uses: bool (..., E, R, R) by expert, source rank and replica rank.

    Shapes: marks (..., E, R).
    """
    ranks = np.arange(cluster.num_ranks)
    nodes = ranks // cluster.ranks_per_node
    held = marks[..., None, :]
    on_rank = held & (ranks[:, None] == ranks)
    on_node = held & (nodes[:, None] == nodes)
    has_own = on_rank.any(-1, keepdims=True)
    has_near = on_node.any(-1, keepdims=True)
    return np.where(has_own, on_rank, np.where(has_near, on_node, held))


def share_load(marks: BoolArray, tokens: FloatArray, cluster: Cluster) -> FloatArray:
    """Return the load of each expert on each rank, in token copies (..., E, R), as even shares.

    Equal to `tokens` multiplied by the shares of `find_nearest`, in O(E R) instead of O(E R^2).

    Shapes: marks (..., E, R); tokens (..., E, R) by source rank.
    """
    shape = (*marks.shape[:-1], cluster.num_nodes, cluster.ranks_per_node)
    held = marks.reshape(shape)
    by_source = np.broadcast_to(tokens, marks.shape).reshape(shape)
    own = np.where(held, by_source, 0.0)
    replicas = held.sum(-1)
    is_covered = replicas > 0
    sent = by_source.sum(-1)  # by the sources of each node (..., E, N)
    within = np.where(is_covered, sent - own.sum(-1), 0.0) / np.maximum(replicas, 1)
    outside = np.where(is_covered, 0.0, sent).sum(-1) / np.maximum(replicas.sum(-1), 1)
    load = np.where(held, own + within[..., None] + outside[..., None, None], 0.0)
    return load.reshape(marks.shape)


def measure_traffic(marks: BoolArray, tokens: FloatArray, cluster: Cluster) -> RemoteCopies:
    """Return the token copies that leave their rank and their node.

    Shapes: marks (..., E, R); tokens (..., E, R) by source rank.
    """
    shape = (*marks.shape[:-1], cluster.num_nodes, cluster.ranks_per_node)
    by_source = np.broadcast_to(tokens, marks.shape)
    off_rank = np.where(marks, 0.0, by_source).sum((-1, -2))
    is_covered = marks.reshape(shape).any(-1)
    off_node = np.where(is_covered, 0.0, by_source.reshape(shape).sum(-1)).sum((-1, -2))
    return RemoteCopies(off_rank, off_node)

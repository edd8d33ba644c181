"""Assignment of a placement's sets of experts to ranks: nearer to the tokens, or with fewer moves.

The ranks of a node are interchangeable with respect to load, and so are nodes. The sets of experts found by
a solver may therefore be assigned to ranks in any order, as long as the sets of one node stay together.

Notation: L MoE layers, E experts, R ranks, N nodes.
"""

from __future__ import annotations

import numpy as np

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.marks import BoolArray
from moeverify.tools.placement.sharing import FloatArray, IntArray


def move_to_sources(marks: BoolArray, copies: FloatArray, cluster: Cluster) -> BoolArray:
    """Return the placement with each set of experts where most of its token copies come from.

    Shapes: marks and copies (L, E, R).
    """
    held = marks.transpose(0, 2, 1).astype(np.float64)
    return _reorder(marks, held @ copies, cluster)


def move_to_current(marks: BoolArray, current: BoolArray, cluster: Cluster) -> BoolArray:
    """Return the placement with as many experts as possible on the ranks that hold them in `current`.

    Shapes: marks and current (L, E, R).
    """
    held = marks.transpose(0, 2, 1).astype(np.float64)
    return _reorder(marks, held @ current.astype(np.float64), cluster)


def _reorder(marks: BoolArray, gains: FloatArray, cluster: Cluster) -> BoolArray:
    """Return marks with columns assigned to ranks for the largest sum of gains (L, R, R), set by rank."""
    result = np.empty_like(marks)
    for layer, gain in enumerate(gains):
        result[layer][:, _assign(gain, cluster)] = marks[layer]
    return result


def _assign(gain: FloatArray, cluster: Cluster) -> IntArray:
    """Return the rank of each set: best order within every pair of nodes, then best pairs of nodes."""
    from scipy.optimize import linear_sum_assignment  # its import takes longer than solving most placements

    size, num_nodes = cluster.ranks_per_node, cluster.num_nodes
    if num_nodes == 1:
        return np.asarray(linear_sum_assignment(gain, maximize=True)[1], dtype=np.int64)
    blocks = gain.reshape(num_nodes, size, num_nodes, size).transpose(0, 2, 1, 3)
    total = np.empty((num_nodes, num_nodes))
    order = np.empty((num_nodes, num_nodes, size), dtype=np.int64)
    for pair in np.ndindex(num_nodes, num_nodes):
        rows, columns = linear_sum_assignment(blocks[pair], maximize=True)
        order[pair] = columns
        total[pair] = blocks[pair][rows, columns].sum()
    to_node = linear_sum_assignment(total, maximize=True)[1]
    ranks = [to_node[node] * size + order[node, to_node[node]] for node in range(num_nodes)]
    return np.asarray(np.concatenate(ranks), dtype=np.int64)

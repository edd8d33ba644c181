"""Distribution of token copies over replicas, against the rule written out one copy at a time."""

from __future__ import annotations

import numpy as np
import pytest

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.cost import measure_cost
from moeverify.tools.placement.load_trace import TokenLoad
from moeverify.tools.placement.sharing import find_nearest, measure_traffic, share_load

CLUSTERS = [Cluster(1), Cluster(4), Cluster(6, 2), Cluster(6, 3), Cluster(8, 4), Cluster(5, 5)]


def draw_marks(random: np.random.Generator, num_experts: int, cluster: Cluster) -> np.ndarray:
    marks = random.random((num_experts, cluster.num_ranks)) < random.choice([0.1, 0.4, 0.9])
    marks[np.arange(num_experts), random.integers(0, cluster.num_ranks, num_experts)] = True
    return marks


def find_candidates(holders: list[int], source: int, cluster: Cluster) -> list[int]:
    """Return the ranks that a source may send to, by the documented rule."""
    near = [rank for rank in holders if cluster.node_of(rank) == cluster.node_of(source)]
    return [source] if source in holders else near or holders


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_shares_follow_the_rule(cluster: Cluster, seed: int) -> None:
    random = np.random.default_rng(seed)
    marks = draw_marks(random, 7, cluster)
    tokens = random.integers(0, 50, marks.shape).astype(float)
    expected = np.zeros(marks.shape)
    off_rank = off_node = 0.0
    for expert in range(7):
        holders = np.flatnonzero(marks[expert]).tolist()
        for source in range(cluster.num_ranks):
            candidates = find_candidates(holders, source, cluster)
            for rank in candidates:
                part = tokens[expert, source] / len(candidates)
                expected[expert, rank] += part
                off_rank += part * (rank != source)
                off_node += part * (cluster.node_of(rank) != cluster.node_of(source))
    np.testing.assert_allclose(share_load(marks, tokens, cluster), expected, rtol=1e-12, atol=1e-12)
    traffic = measure_traffic(marks, tokens, cluster)
    np.testing.assert_allclose([traffic.off_rank, traffic.off_node], [off_rank, off_node], atol=1e-9)
    nearest = find_nearest(marks, cluster)
    weights = nearest / nearest.sum(-1, keepdims=True)
    np.testing.assert_allclose((weights * tokens[..., None]).sum(1), expected, atol=1e-9)


def test_what_stays_on_its_rank_is_no_traffic() -> None:
    cluster = Cluster(4)
    everywhere = np.ones((1, 3, 4), dtype=bool)
    cost = measure_cost(everywhere, TokenLoad(np.full((1, 3, 4), 5.0), is_even=True), cluster)
    assert (cost.off_rank, cost.off_node, cost.num_replicas) == (0.0, 0.0, 9)
    assert cost.balancedness == 1.0

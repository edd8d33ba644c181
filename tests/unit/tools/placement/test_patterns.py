"""The search over sets of replicas: it agrees with the program over replicas on ranks, and is fast."""

from __future__ import annotations

import numpy as np
import pytest

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.cost import bound_load
from moeverify.tools.placement.exact import solve_exactly
from moeverify.tools.placement.heuristic import solve
from moeverify.tools.placement.load_trace import spread_evenly
from moeverify.tools.placement.marks import mark
from moeverify.tools.placement.patterns import PatternSearch, _list_patterns, _list_replicas
from moeverify.tools.placement.placement import place_in_blocks
from moeverify.tools.placement.program import LayerProgram


@pytest.mark.parametrize("seed", range(6))
def test_both_programs_have_the_same_optimum(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_experts, num_ranks, num_slots = 7, 3 + seed % 2, 3
    by_expert = (random.random(num_experts) ** 3 * 1000).round() + 1
    load, cluster = spread_evenly(by_expert[None], num_ranks), Cluster(num_ranks)
    blocks = mark(place_in_blocks(num_experts, num_ranks, [0]))[0]
    start = float((blocks * by_expert[:, None]).sum(0).max())
    search = PatternSearch(
        by_expert, num_ranks, num_slots, float(bound_load(load, cluster, num_slots)[0]), start, blocks
    )
    search.run(60)
    program = LayerProgram(load.copies[0], cluster, num_slots, start, is_even=True)
    program.build()
    answer = program.minimize(program.largest_load(), [], 60, is_ordered=True)
    assert search.is_optimal
    assert answer.is_optimal
    assert search.largest == pytest.approx(program.to_copies(answer.bound), rel=1e-5)
    loads = (search.marks * (by_expert / search.marks.sum(1))[:, None]).sum(0)
    assert loads.max() == pytest.approx(search.largest)
    assert search.marks.sum(0).max() <= num_slots
    assert search.marks.any(1).all()


def test_a_placement_that_reaches_the_bound_is_optimal_without_any_time() -> None:
    load, cluster = spread_evenly(np.full((1, 8), 10.0), 4), Cluster(4)
    blocks = mark(place_in_blocks(8, 4, [0]))
    answer = solve_exactly(load, cluster, 4, blocks, seconds=0, bound=bound_load(load, cluster, 4))
    assert answer.statuses == ("optimal",)
    assert answer.bound[0] == pytest.approx(20)


def test_the_list_of_patterns_ends_when_the_time_does() -> None:
    load = np.random.default_rng(0).random(64) + 1
    replicas = _list_replicas(load, np.ones(64, dtype=np.int64), np.full(64, 2))
    assert _list_patterns(replicas, 9, 0.0, 100.0, ends=0.0) is None


def test_many_slots_are_too_many_for_patterns_and_still_solved() -> None:
    load, cluster = spread_evenly(np.arange(1.0, 1201.0)[None] ** 3, 2), Cluster(2)
    incumbent = solve(load, cluster, 700)
    answer = solve_exactly(load, cluster, 700, incumbent, seconds=1, bound=bound_load(load, cluster, 700))
    assert answer.marks.any(2).all()
    assert answer.statuses[0] in ("optimal", "time limit")

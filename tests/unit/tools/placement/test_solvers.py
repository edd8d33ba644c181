"""The solvers: valid, never worse, deterministic, and as good as the optimum where it is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moeverify.errors import CaseError
from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.cost import bound_load, measure_cost
from moeverify.tools.placement.heuristic import list_slots, mark_slots, solve
from moeverify.tools.placement.incremental import improve
from moeverify.tools.placement.load_trace import TokenLoad, spread_evenly, sum_steps
from moeverify.tools.placement.marks import from_marks, mark
from moeverify.tools.placement.moves import list_moves
from moeverify.tools.placement.placement import Placement, place_in_blocks
from moeverify.tools.placement.plan import make_plan
from moeverify.tools.placement.sharing import share_load
from moeverify.tools.placement.synthetic import KINDS, make_trace

pytestmark = pytest.mark.slow

# Experts, ranks, nodes, slots: spare ones or none, more ranks than experts, one rank, one expert.
SIZES = [
    (16, 4, 1, 4),
    (16, 4, 1, 6),
    (16, 4, 2, 5),
    (12, 8, 4, 3),
    (64, 8, 2, 9),
    (10, 4, 1, 3),
    (4, 8, 1, 2),
    (2, 8, 4, 2),
    (5, 1, 1, 5),
    (1, 3, 1, 1),
    (3, 6, 3, 3),
]


def find_largest(marks: np.ndarray, load: TokenLoad, cluster: Cluster) -> np.ndarray:
    return share_load(marks, load.copies, cluster).sum(1).max(1)


def assert_valid(marks: np.ndarray, num_slots: int) -> None:
    assert marks.any(2).all(), "an expert is nowhere"
    assert marks.any(1).all(), "a rank holds nothing"
    assert marks.sum(1).max() <= num_slots
    from_marks(marks, range(len(marks)))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_known", [False, True])
def test_solutions_are_valid_and_above_the_bound(
    size: tuple[int, int, int, int], kind: str, is_known: bool
) -> None:
    num_experts, num_ranks, num_nodes, num_slots = size
    cluster = Cluster(num_ranks, num_nodes)
    trace = make_trace(
        kind,
        seed=1,
        num_layers=2,
        num_experts=num_experts,
        num_sources=num_ranks if is_known else 1,
        source_skew=0.5,
    )
    load = sum_steps(trace, cluster)
    marks = solve(load, cluster, num_slots)
    assert_valid(marks, num_slots)
    assert (find_largest(marks, load, cluster) >= bound_load(load, cluster, num_slots) * (1 - 1e-9)).all()
    assert (marks == solve(load, cluster, num_slots)).all()


@pytest.mark.parametrize("seed", range(12))
def test_any_load_is_solved(seed: int) -> None:
    """Loads of any form: zeros, one expert with everything, ties, non-integer numbers."""
    random = np.random.default_rng(seed)
    num_nodes = int(random.choice([1, 1, 2, 3]))
    num_ranks = num_nodes * int(random.integers(1, 5))
    num_experts = int(random.integers(1, 20))
    num_slots = -(-num_experts // num_ranks) + int(random.integers(0, 4))
    num_slots = min(num_slots, num_experts)
    by_expert = [
        np.zeros((1, num_experts)),
        np.eye(1, num_experts) * 7.0,
        np.ones((1, num_experts)),
        random.random((1, num_experts)) ** 8,
        random.integers(0, 3, (1, num_experts)).astype(float),
    ]
    load = spread_evenly(np.concatenate(by_expert), num_ranks)
    cluster = Cluster(num_ranks, num_nodes)
    assert_valid(solve(load, cluster, num_slots), num_slots)


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_experts_and_ranks_do_not_matter(kind: str) -> None:
    cluster, num_slots = Cluster(8), 5
    load = sum_steps(make_trace(kind, seed=2, num_layers=3, num_experts=32), cluster)
    order = np.random.default_rng(0).permutation(32)
    renamed = TokenLoad(load.copies[:, order], load.is_even)
    np.testing.assert_allclose(
        find_largest(solve(load, cluster, num_slots), load, cluster),
        find_largest(solve(renamed, cluster, num_slots), renamed, cluster),
        rtol=1e-12,
    )


def test_layers_do_not_depend_on_each_other() -> None:
    cluster = Cluster(16)
    load = sum_steps(make_trace("zipf", seed=2, num_layers=4, num_experts=64), cluster)
    alone = [solve(load.take(slice(row, row + 1)), cluster, 5)[0] for row in range(4)]
    assert (solve(load, cluster, 5) == np.stack(alone)).all()


def find_optimum(load: np.ndarray, num_ranks: int, num_slots: int) -> float:
    """Return the least largest load of even sources, by trying every set of ranks for every expert."""
    sets = [
        np.array(marks, dtype=bool) for marks in itertools.product([0, 1], repeat=num_ranks) if any(marks)
    ]
    best = np.inf
    for choice in itertools.product(sets, repeat=len(load)):
        marks = np.array(choice)
        if marks.sum(0).max() <= num_slots and marks.sum(0).min() >= 1:
            loads = (marks * (load / marks.sum(1))[:, None]).sum(0)
            best = min(best, float(loads.max()))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_a_placement_is_close_to_the_optimum_and_the_bound_below_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_ranks, num_experts, num_slots = 3, 5, 2 + seed % 2
    by_expert = (random.random(num_experts) ** 3 * 1000).round() + 1
    load, cluster = spread_evenly(by_expert[None], num_ranks), Cluster(num_ranks)
    optimum = find_optimum(by_expert, num_ranks, num_slots)
    assert bound_load(load, cluster, num_slots)[0] <= optimum * (1 + 1e-9)
    heuristic = find_largest(solve(load, cluster, num_slots), load, cluster)[0]
    assert optimum * (1 - 1e-9) <= heuristic <= optimum * 1.15


def _list_placements(num_experts: int, num_ranks: int, num_slots: int) -> itertools.chain:
    """Return all placements within the slots in which every rank holds an expert."""
    sets = [marks for marks in itertools.product([False, True], repeat=num_ranks) if any(marks)]

    def extend(rows: list, filled: np.ndarray) -> itertools.chain:
        if len(rows) == num_experts:
            return iter([np.array(rows)] if filled.min() >= 1 else [])
        return itertools.chain.from_iterable(
            extend([*rows, marks], filled + marks) for marks in sets if (filled + marks).max() <= num_slots
        )

    return extend([], np.zeros(num_ranks, dtype=int))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_few_moves_make_most_of_the_gain(kind: str, num_nodes: int) -> None:
    cluster, num_slots = Cluster(8, num_nodes), 5
    load = sum_steps(make_trace(kind, seed=1, num_layers=3, num_experts=32), cluster)
    current = mark(place_in_blocks(32, 8, range(3)))
    best = solve(load, cluster, num_slots)
    before, possible = find_largest(current, load, cluster).sum(), find_largest(best, load, cluster).sum()
    result = improve(current, best, load, cluster, num_slots)
    assert_valid(result.marks, num_slots)
    after = find_largest(result.marks, load, cluster).sum()
    assert before - after >= 0.95 * (before - possible) * (1 - 1e-9)
    assert result.sends == (result.marks & ~current).sum()
    assert result.sends < result.best_sends / 2 or kind == "uniform"
    previous = before
    for limit in (0, 1, 3, 7, result.sends):
        limited = improve(current, best, load, cluster, num_slots, max_moves=limit)
        assert limited.sends <= limit
        after = find_largest(limited.marks, load, cluster).sum()
        assert after <= previous * (1 + 1e-12), "more moves, less gain"
        previous = after


@pytest.mark.parametrize("seed", range(3))
def test_moves_are_close_to_the_fewest_that_reach_the_same(seed: int) -> None:
    """Compare with an exhaustive search: small placements, one layer."""
    random = np.random.default_rng(seed)
    by_expert = (random.random(5) ** 2 * 100).round() + 1
    cluster, num_slots = Cluster(3), 2
    load = spread_evenly(by_expert[None], 3)
    current = mark(Placement(5, (((0, 1), (2, 3), (4,)),), (0,)))
    best = solve(load, cluster, num_slots)
    result = improve(current, best, load, cluster, num_slots)
    reached = find_largest(result.marks, load, cluster)[0]
    fewest = min(
        int((marks & ~current[0]).sum())
        for marks in _list_placements(5, 3, num_slots)
        if find_largest(marks[None], load, cluster)[0] <= reached * (1 + 1e-9)
    )
    assert result.sends <= fewest + 1


@pytest.mark.parametrize("seed", range(5))
def test_moves_lead_from_one_placement_to_the_other(seed: int) -> None:
    random = np.random.default_rng(seed)
    cluster = Cluster(6, 2)
    loads = [spread_evenly(random.random((2, 10)) ** 4, 6) for _ in range(2)]
    before, after = (from_marks(solve(load, cluster, 3), [1, 4]) for load in loads)
    marks = {layer: row.copy() for layer, row in zip((1, 4), mark(before), strict=True)}
    moves = list_moves(before, after, cluster)
    for move in moves:
        assert mark(before)[(1, 4).index(move.layer), move.expert, move.source], "a source that has it not"
    for move in moves:
        if move.kind != "drop":
            assert not marks[move.layer][move.expert, move.target]
            marks[move.layer][move.expert, move.target] = True
        if move.kind != "copy":
            marks[move.layer][move.expert, move.source] = False
    assert (np.stack([marks[1], marks[4]]) == mark(after)).all()
    assert sum(move.kind != "drop" for move in moves) == (mark(after) & ~mark(before)).sum()
    assert not list_moves(after, after, cluster)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("num_sources", [1, 8])
def test_a_plan_is_never_worse_than_what_is_in_use(kind: str, num_nodes: int, num_sources: int) -> None:
    cluster = Cluster(8, num_nodes)
    trace = make_trace(kind, seed=4, num_layers=2, num_experts=16, num_sources=num_sources, num_steps=3)
    first = make_plan(trace, cluster, 3)
    assert (first.after.cost.largest <= first.before.cost.largest).all()
    again = make_plan(trace, cluster, 3, current=first.after.placement)
    assert (again.after.cost.largest <= first.after.cost.largest * (1 + 1e-12)).all()
    limited = make_plan(trace, cluster, 3, current=first.after.placement, max_moves=5)
    assert (limited.after.cost.largest <= first.after.cost.largest * (1 + 1e-12)).all()
    assert first.gap >= -1e-9
    assert first.after.steps <= first.after.cost.balancedness + 1e-9


def test_what_does_not_fit_together_is_said() -> None:
    trace = make_trace("zipf", seed=0, num_experts=16)
    with pytest.raises(CaseError, match="4 ranks with 3 slots each hold 12 experts, the trace has 16"):
        make_plan(trace, Cluster(4), 3)
    with pytest.raises(CaseError) as error:
        make_plan(
            trace, Cluster(4), 4, current=place_in_blocks(8, 2, [3]), current_file="now.yaml", max_moves=-1
        )
    said = str(error.value)
    for words in (
        "8 experts, the model has 16",
        "2 ranks, expected 4",
        "MoE layers 3, the model has 0",
        "0 moves",
    ):
        assert words in said
    crowded = Placement(16, ((tuple(range(14)), (14,), (15,), (0,)),))
    with pytest.raises(CaseError, match="a rank holds 14 experts, and there are 4 slots"):
        make_plan(trace, Cluster(4), 4, current=crowded)
    empty = make_trace("zipf", seed=0, num_experts=4, copies_per_step=0)
    with pytest.raises(CaseError, match="holds no token"):
        make_plan(empty, Cluster(2), 2)
    with pytest.raises(CaseError, match="8 ranks do not divide evenly among 3 nodes"):
        Cluster(8, 3)


def test_slots_and_marks_are_the_same_thing() -> None:
    marks = mark(Placement(5, (((0, 1, 4), (2, 3), (0, 3)),), (0,)))
    slots = list_slots(marks, 4)
    assert slots[0].tolist() == [[0, 1, 4, -1], [2, 3, -1, -1], [0, 3, -1, -1]]
    assert (mark_slots(slots, 5) == marks).all()


def test_the_worked_example_of_hot_experts() -> None:
    """Expert 0 has half the load: with four spare slots it is on all four ranks, and loads are even."""
    load = spread_evenly(np.array([[40.0, 10.0, 10.0, 10.0, 10.0]]), 4)
    cluster = Cluster(4)
    marks = solve(load, cluster, 2)
    assert marks[0, 0].all()
    cost = measure_cost(marks, load, cluster)
    assert cost.balancedness == pytest.approx(1.0)
    assert cost.off_rank == pytest.approx((80 - 40 - 10) / 80)

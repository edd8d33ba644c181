"""Placements that are recomputed every few steps from the load so far."""

from __future__ import annotations

import numpy as np
import pytest

from moeverify.tools.placement.placement import Placement, place_in_blocks
from moeverify.tools.placement.policy import Policy, list_solved

FIRST = place_in_blocks(8, 2, (1, 3))


def draw_load(num_steps: int, *hot: int) -> np.ndarray:
    """Return the load of steps with one hot expert each; the last one stays hot."""
    copies = np.ones((num_steps, 2, 8, 2), dtype=np.int64)
    for step in range(num_steps):
        copies[step, :, hot[min(step, len(hot) - 1)]] = 100
    return copies


def list_holders(placement: Placement, expert: int) -> list[int]:
    return [rank for rank, row in enumerate(placement.matrices[0]) if expert in row]


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3]), (5, [])])
def test_nothing_is_solved_after_the_last_step(every: int, steps: list[int]) -> None:
    assert list(list_solved(draw_load(5, 0), FIRST, Policy(every, slots=5))) == steps


def test_a_hot_expert_gets_a_replica_and_the_steps_to_come_play_no_part() -> None:
    solved = list_solved(draw_load(4, 0, 0, 7), FIRST, Policy(2, slots=5, last=2))
    assert list_holders(solved[2], 0) == [0, 1]
    assert len(list_holders(solved[2], 7)) == 1


def test_the_last_steps_alone_are_used() -> None:
    load = np.random.default_rng(0).integers(1, 100, (4, 2, 8, 2))
    last = Policy(1, slots=5, last=1).solve(load, FIRST)
    assert last == Policy(1, slots=5).solve(load[-1:], FIRST)
    assert last != Policy(1, slots=5).solve(load, FIRST)


def test_no_expert_is_sent_where_none_may_be() -> None:
    solved = list_solved(draw_load(3, 0), FIRST, Policy(1, slots=5, max_moves=0))
    assert all(placement.matrices == FIRST.matrices for placement in solved.values())


def test_without_a_token_everything_stays() -> None:
    assert Policy(1, slots=5).solve(np.zeros((1, 2, 8, 2), dtype=np.int64), FIRST) is FIRST

"""Sender and receiver of each expert when a placement changes."""

from __future__ import annotations

from moeverify.parallel.move_experts import Journey, choose_source

BEFORE = ((0, 1, 2), (2, 3), (2, 4))
AFTER = ((2, 0), (4, 1, 0), (3, 2, 4))


def test_each_expert_that_is_missing_comes_from_one_rank_that_has_it() -> None:
    journey = Journey(BEFORE, AFTER)
    for rank, row in enumerate(AFTER):
        come = [(source, expert) for source, experts in journey.list_received(rank) for expert in experts]
        assert sorted(expert for _, expert in come) == sorted(set(row) - set(BEFORE[rank]))
        for source, expert in come:
            assert expert in BEFORE[source]
            assert expert in journey.list_sent(source, rank)


def test_nothing_travels_where_nothing_changes() -> None:
    journey = Journey(BEFORE, BEFORE)
    assert all(not journey.list_sent(source, rank) for source in range(3) for rank in range(3))


def test_replicas_take_turns_to_send() -> None:
    assert {choose_source(expert, 3, ((5, 6, 7), (5, 6, 7), (5, 6, 7), ())) for expert in (5, 6, 7)} == {
        0,
        1,
        2,
    }

"""Experts by their holders, and placements by name."""

from __future__ import annotations

import pytest

from moeverify.tools.placement.buckets import Bucket, list_buckets, order_rows
from moeverify.tools.placement.placement import STRATEGIES, Placement


def test_experts_of_the_same_ranks_are_one_bucket() -> None:
    buckets = list_buckets(((4, 0, 3), (1, 3, 2), (3, 1, 4)))
    assert buckets == (
        Bucket((0,), (0,)),
        Bucket((0, 1, 2), (3,)),
        Bucket((0, 2), (4,)),
        Bucket((1,), (2,)),
        Bucket((1, 2), (1,)),
    )
    assert order_rows(buckets, 3) == ((0, 3, 4), (3, 2, 1), (3, 4, 1))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 4), (7, 3), (2, 4), (1, 1)])
def test_a_strategy_gives_a_placement(name: str, num_experts: int, num_ranks: int) -> None:
    placement = STRATEGIES[name](num_experts, num_ranks, (1, 3))
    assert isinstance(placement, Placement)  # which has checked itself
    assert (placement.num_ranks, placement.layers) == (num_ranks, (1, 3))


def test_striped_deals_experts_out_like_cards() -> None:
    assert STRATEGIES["striped"](5, 2, (0,)).matrices[0] == ((0, 2, 4), (1, 3))

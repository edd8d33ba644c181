"""Gradients that a rank has summed in the group of other slices, and similar errors."""

from __future__ import annotations

import pytest
from torch import Tensor
from wrong_tensors import draw, examine

from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause

SHAPE = (4, 3)
HOLDERS = {0: (0, 1), 1: (0, 2), 2: (0, 3), 3: (2, 3)}
"""The ranks that hold each slice; rank 0 is in three groups of two."""


def draw_parts() -> dict[tuple[int, int], Tensor]:
    """Return each holder's computed part of the gradient of each slice."""
    pairs = [(rank, index) for index, ranks in HOLDERS.items() for rank in ranks]
    return {pair: draw(3, seed=number) for number, pair in enumerate(pairs)}


def reduce(order: dict[tuple[int, int], int], *, lost: tuple[int, int] | None = None) -> WrongTensor:
    """Return the ranks' sums; `order` gives the slice whose group a rank uses for its part."""
    parts = draw_parts()
    expected = draw(*SHAPE) * 0
    for (_, index), part in parts.items():
        expected[index] += part
    sums = [0 * draw(3) for _ in HOLDERS]
    for pair, part in parts.items():
        if pair != lost:
            sums[order.get(pair, pair[1])] += part
    shards = tuple(
        RankShard(rank, Region.box(SHAPE, [(index,), range(3)]), sums[order.get((rank, index), index)][None])
        for rank, index in parts
    )
    return WrongTensor((0, "gradient", "layers.1.moe.experts.up"), expected, shards)


@pytest.mark.parametrize(
    ("order", "indices"),
    [
        pytest.param({(0, 0): 1, (0, 1): 0}, (0, 1), id="two groups exchanged"),
        pytest.param({(0, 0): 1, (0, 1): 2, (0, 2): 0}, (0, 1, 2), id="three groups in a circle"),
    ],
)
def test_a_rank_that_takes_one_group_for_another(
    order: dict[tuple[int, int], int], indices: tuple[int, ...]
) -> None:
    explanation = examine("crossed_sums", reduce(order)).explanation
    assert explanation.cause is Cause.COLLECTIVES
    assert (explanation.operation.block.indices, explanation.operation.ranks) == (indices, (0,))
    assert explanation.operation.block.unit == "expert"


def test_of_two_ranks_that_do_so_none_is_blamed_alone() -> None:
    order = {(0, 0): 1, (0, 1): 0, (2, 1): 3, (2, 3): 1}
    explanation = examine("crossed_sums", reduce(order)).explanation
    assert (explanation.operation.block.indices, explanation.operation.ranks) == ((0, 1, 3), ())


def test_a_part_that_is_in_no_sum_is_something_else() -> None:
    assert examine("crossed_sums", reduce({}, lost=(0, 1))).explanation is None
    assert examine("crossed_sums", reduce({(0, 0): 1, (0, 1): 0}, lost=(2, 1))).explanation is None


def test_slices_that_are_wrong_each_by_itself_are_not_crossed() -> None:
    right = reduce({})
    shards = tuple(
        RankShard(shard.rank, shard.region, shard.values() + draw(1, 3, seed=50 + shard.region.dims[0][0]))
        for shard in right.shards
    )
    assert examine("crossed_sums", WrongTensor(right.key, right.expected, shards)).explanation is None

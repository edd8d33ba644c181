"""Regions of shards by hand, where torch's own words are not asked; see tests/ranks/layout for real DTensors."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from moeverify.layout.placement import shard_region, sharding_order


def find_dims(
    shape: tuple[int, ...], mesh: tuple[int, ...], rank: tuple[int, ...], *placements: object
) -> tuple:
    return shard_region(shape, mesh, rank, placements).dims  # type: ignore[arg-type]


def test_one_axis() -> None:
    assert find_dims((8, 6), (4,), (1,), Shard(0)) == (range(2, 4), range(6))
    assert find_dims((8, 6), (3,), (2,), Shard(-1)) == (range(8), range(4, 6))
    assert find_dims((8, 6), (4,), (1,), Replicate()) == (range(8), range(6))
    assert find_dims((8, 6), (4,), (1,), Partial()) == (range(8), range(6))


@pytest.mark.parametrize(
    ("rank", "held"), [(0, range(2)), (1, range(2, 4)), (2, range(4, 5)), (3, range(5, 5))]
)
def test_uneven_shards_as_torch_chunks_them(rank: int, held: range) -> None:
    assert find_dims((5,), (4,), (rank,), Shard(0)) == (held,)


def test_two_axes_on_one_dim_cut_one_after_the_other() -> None:
    assert find_dims((8,), (2, 2), (1, 0), Shard(0), Shard(0)) == (range(4, 6),)


def test_a_strided_shard_is_cut_after_the_axis_behind_it() -> None:
    # FSDP over a tensor that tensor parallelism has cut before: rank (fsdp 1, tp 0) has the second half of
    # the first half.
    strided = _StridedShard(0, split_factor=2)
    assert find_dims((8,), (2, 2), (1, 0), strided, Shard(0)) == (range(2, 4),)
    assert sharding_order((2, 2), (strided, Shard(0)), 1) == [(1, 0), (0, 0)]
    assert sharding_order((2, 2), (strided, Shard(-1)), 1) == [(1, 0), (0, 0)]
    assert sharding_order((2, 2), (Shard(0), Shard(0)), 1) == [(0, 0), (1, 0)]


def test_a_strided_shard_passes_over_axes_of_other_dims() -> None:
    placements = (_StridedShard(0, split_factor=2), Shard(1), Shard(0))
    assert sharding_order((2, 2, 2), placements, 2)[-1] == (0, 0)
    assert find_dims((8, 4), (2, 2, 2), (1, 0, 1), *placements) == (range(6, 8), range(2))


def test_all_ranks_together_hold_everything_once() -> None:
    placements = (_StridedShard(0, split_factor=2), Replicate(), Shard(0))
    held = [
        index
        for first in range(2)
        for last in range(2)
        for index in find_dims((7,), (2, 3, 2), (first, 0, last), *placements)[0]
    ]
    assert sorted(held) == list(range(7))

"""Handmade regions of shards, without torch's placement; see tests/ranks/parallel/regions for real DTensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from moeverify.parallel.regions.placement import shard_region, sharding_order


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
    # FSDP over a tensor that tensor parallelism has already sharded: rank (fsdp 1, tp 0) has the second
    # half of the first half.
    strided = _StridedShard(0, split_factor=2)
    assert find_dims((8,), (2, 2), (1, 0), strided, Shard(0)) == (range(2, 4),)
    assert sharding_order((2, 2), (strided, Shard(0)), 1) == [(1, 0, 1), (0, 0, 1)]
    assert sharding_order((2, 2), (strided, Shard(-1)), 1) == [(1, 0, 1), (0, 0, 1)]
    assert sharding_order((2, 2), (Shard(0), Shard(0)), 1) == [(0, 0, 1), (1, 0, 1)]


def test_a_strided_shard_passes_over_axes_of_other_dims() -> None:
    placements = (_StridedShard(0, split_factor=2), Shard(1), Shard(0))
    assert sharding_order((2, 2, 2), placements, 2)[-1] == (0, 0, 1)
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


@pytest.mark.parametrize("size", [4, 6, 7, 8, 11, 16])
@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_strided_shard_with_no_axis_behind_it_is_cut_in_blocks(size: int, factor: int, ranks: int) -> None:
    # Packed gate and up under tensor parallelism: torch itself determines the rows of each rank.
    strided = _StridedShard(0, split_factor=factor)
    parts, _ = strided._split_tensor(torch.arange(size), ranks, with_padding=False)
    found = [find_dims((size,), (ranks,), (rank,), strided)[0] for rank in range(ranks)]
    assert [list(indices) for indices in found] == [part.tolist() for part in parts]


def test_fsdp_over_packed_rows_cuts_what_the_rank_stores() -> None:
    # tp has cut 16 packed rows into (0..3, 8..11) and (4..7, 12..15); FSDP2 halves the 8 local rows.
    placements = (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2))
    assert find_dims((16,), (2, 2), (0, 0), *placements) == (range(4),)
    assert find_dims((16,), (2, 2), (1, 1), *placements) == (range(12, 16),)
    # Over four: half of a block each.
    assert find_dims((16,), (4, 2), (1, 0), _StridedShard(0, split_factor=2), placements[1]) == (range(2, 4),)


def test_packed_rows_of_a_matrix() -> None:
    assert find_dims((8, 3), (2,), (1,), _StridedShard(0, split_factor=2)) == ((2, 3, 6, 7), range(3))
    assert find_dims((2, 8, 3), (2,), (0,), _StridedShard(-2, split_factor=2))[1] == (0, 1, 4, 5)

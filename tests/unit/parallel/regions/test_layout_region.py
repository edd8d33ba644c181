"""Regions read, write and number the same elements of a logical tensor for any sharding."""

from __future__ import annotations

import pytest
import torch

from moeverify.parallel.regions.region import Region, as_indices

SHAPE = (4, 6, 3)
REGIONS = {
    "whole": Region.whole(SHAPE),
    "box": Region.box(SHAPE, [range(1, 3), range(6), range(2, 3)]),
    "irregular": Region.box(SHAPE, [(3, 0), range(6), (2, 0)]),
    "zigzag": Region.box(SHAPE, [range(4), (0, 1, 4, 5), range(3)]),
    "flat": Region.run(SHAPE, 5, 47),
    "scalar": Region.whole(()),
    "empty box": Region.box(SHAPE, [range(4), range(6, 6), range(3)]),
    "no indices": Region.box(SHAPE, [(), range(6), range(3)]),
    "empty run": Region.run(SHAPE, 7, 7),
    "of nothing": Region.whole((0, 3)),
}


def number(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose elements are their own row-major indices."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize("name", REGIONS)
def test_take_and_flat_index_agree(name: str) -> None:
    region = REGIONS[name]
    taken = region.take(number(region.shape))
    assert tuple(taken.shape) == region.local_shape
    assert taken.numel() == region.numel
    index = region.flat_index()
    assert index.dtype == torch.int64
    assert torch.equal(index, taken)


@pytest.mark.parametrize("name", REGIONS)
def test_global_index_of_every_position(name: str) -> None:
    region = REGIONS[name]
    expected = [
        tuple(int(part) for part in torch.unravel_index(value, region.shape)) if region.shape else ()
        for value in region.flat_index().reshape(-1)
    ]
    assert [region.global_index(position) for position in range(region.numel)] == expected


@pytest.mark.parametrize("name", REGIONS)
def test_put_writes_what_take_reads_and_nothing_else(name: str) -> None:
    region = REGIONS[name]
    source = number(region.shape).to(torch.float64) + 1.0
    whole = torch.zeros_like(source)
    region.put(whole, region.take(source))
    assert torch.equal(region.take(whole), region.take(source))
    assert int((whole != 0).sum()) == region.numel


def test_regions_of_all_ranks_cover_the_tensor_once() -> None:
    parts = [
        Region.box(SHAPE, [range(4), (0, 5), range(3)]),
        Region.box(SHAPE, [range(4), range(1, 5), range(3)]),
    ]
    whole = torch.full(SHAPE, -1)
    for part in parts:
        part.put(whole, part.take(number(SHAPE)))
    assert torch.equal(whole, number(SHAPE))


def test_take_of_a_box_is_a_view() -> None:
    whole = number(SHAPE)
    REGIONS["box"].take(whole).zero_()
    assert int((whole == 0).sum()) == 12 + 1


def test_keys_are_equal_for_equal_regions_only() -> None:
    keys = [region.key for region in REGIONS.values() if region.shape == SHAPE and region.numel]
    assert len(set(keys)) == len(keys)
    assert Region.box(SHAPE, [(1, 2), range(6), [2]]).key == REGIONS["box"].key
    many = tuple(range(0, 60, 2))
    other = (*many[:-1], 59)
    assert Region.box((60,), [many]).key != Region.box((60,), [other]).key
    assert Region.box((60,), [many]).key != Region.box((60,), [many[::-1]]).key


def test_which_regions_are_whole() -> None:
    assert REGIONS["whole"].is_whole
    assert Region.run(SHAPE, 0, 72).is_whole
    assert Region.box(SHAPE, [(0, 1, 2, 3), range(6), range(3)]).is_whole
    assert not Region.run(SHAPE, 0, 71).is_whole
    assert not Region.box(SHAPE, [(1, 0, 2, 3), range(6), range(3)]).is_whole


def test_indices_become_a_range_where_they_are_one() -> None:
    assert as_indices([3, 4, 5]) == range(3, 6)
    assert as_indices([5, 4, 3]) == (5, 4, 3)
    assert as_indices(range(0, 6, 2)) == (0, 2, 4)
    assert as_indices([]) == ()

"""A region's boxes cover it exactly once, and their views alias the right values."""

from __future__ import annotations

import random

import pytest
import torch

from moeverify.parallel.regions.region import Region
from moeverify.tools.checkpoint.hyperrect import split_region


def draw_region(random_: random.Random) -> Region:
    shape = tuple(random_.randint(1, 6) for _ in range(random_.randint(0, 4)))
    if random_.random() < 0.5:
        size = torch.Size(shape).numel()
        start = random_.randint(0, size)
        return Region.run(shape, start, random_.randint(start, size))
    dims = []
    for size in shape:
        chosen = sorted(random_.sample(range(size), random_.randint(0, size)))
        if random_.random() < 0.3:
            random_.shuffle(chosen)
        dims.append(chosen)
    return Region.box(shape, dims)


@pytest.mark.parametrize("seed", range(200))
def test_boxes_write_and_read_exactly_the_region(seed: int) -> None:
    region = draw_region(random.Random(seed))
    whole = torch.arange(torch.Size(region.shape).numel(), dtype=torch.float64).reshape(region.shape)
    local = region.take(whole).clone()
    found = torch.full(region.shape, -1.0, dtype=torch.float64)
    for box, view in split_region(region, local):
        assert box.numel > 0
        window = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        assert (found[window] == -1.0).all()  # no element twice
        found[window] = view
        view.copy_(view + 0.5)  # a view of the local tensor, not a copy
    wanted = torch.full_like(found, -1.0)
    region.put(wanted, region.take(whole))
    assert torch.equal(found, wanted)
    assert torch.equal(local, region.take(whole) + 0.5)


def test_a_flat_run_of_whole_rows_is_one_box() -> None:
    boxes = [box for box, _ in split_region(Region.run((4, 3), 3, 12), torch.zeros(9))]
    assert [(box.offset, box.shape) for box in boxes] == [((1, 0), (3, 3))]


def test_a_run_in_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(RuntimeError):
        list(split_region(Region.run((4, 3), 0, 6), torch.zeros(2, 6)[:, :3]))

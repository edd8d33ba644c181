"""A rank's tensor is found in another as a block, as rows or as a multiple; else the distance is given."""

from __future__ import annotations

import math

import pytest
import torch
from recordings import make
from torch import Tensor

from moeverify.explain.relate import Reference, measure_error

BOUND = 1e-8
WHOLE = make(6, 8)
MASKED = WHOLE.masked_fill(WHOLE > 1, -math.inf)


@pytest.mark.parametrize(
    ("mine", "place"),
    [
        (WHOLE, "whole"),
        (WHOLE[2:4], "dim 0: 2-3 of 6"),
        (WHOLE[:, 4:], "dim 1: 4-7 of 8"),
        (WHOLE[3:, :4], "dim 0: 3-5 of 6, dim 1: 0-3 of 8"),
        (WHOLE[[4, 0, 5, 2, 1, 3]], "6 rows of 6 in another order"),
        (WHOLE[1:5], "rows 1-4 of 6"),
        (WHOLE[1::2], "rows 1-5 of 6 in steps of 2"),
        (WHOLE[[0, 0, 1, 2, 3]], "5 rows of 6, some of them several times"),
        (WHOLE[[5, 1, 0, 2, 3], 4:], "5 rows of 6 in another order, dim 1: 4-7 of 8"),
        (torch.cat([WHOLE[[3, 1]], torch.zeros(3, 8)]), "2 rows of 6 in another order"),
        (torch.zeros(0, 8), "empty"),
        (WHOLE.reshape(2, 3, 8), "whole, in another shape"),
    ],
)
def test_a_part_is_found(mine: Tensor, place: str) -> None:
    found = Reference(WHOLE, BOUND).relate(mine)
    assert found is not None
    assert (found.place, found.factor) == (place, 1.0)
    assert found.error <= BOUND


def test_of_blocks_that_are_wrong_the_nearest_is_told() -> None:
    wrong = WHOLE[2:4] + 0.01
    found = Reference(WHOLE, BOUND).relate(wrong)
    assert found is not None
    assert (found.place, found.factor) == ("dim 0: 2-3 of 6", 1.0)
    assert found.error == pytest.approx(measure_error(wrong, WHOLE[2:4]))


def test_a_multiple_is_told_with_its_factor() -> None:
    found = Reference(WHOLE, BOUND).relate(WHOLE[2:4] * -3)
    assert found is not None
    assert (found.place, found.factor) == ("dim 0: 2-3 of 6", pytest.approx(-3))
    single = Reference(torch.tensor(2.0), BOUND).relate(torch.tensor(6.0))
    assert single is not None
    assert (single.factor, single.error) == (1.0, 2.0)  # a number is a multiple of any other


def test_masks_with_infinities_are_compared_where_they_are_finite() -> None:
    reference = Reference(MASKED, BOUND)
    same, shifted = reference.relate(MASKED[:3].clone()), reference.relate(MASKED[:3] * 1.5)
    others = reference.relate(WHOLE[:3])
    assert same is not None
    assert shifted is not None
    assert others is not None
    assert (same.place, same.error) == ("dim 0: 0-2 of 6", 0.0)
    assert (shifted.place, shifted.factor) == ("dim 0: 0-2 of 6", pytest.approx(1.5))
    assert others.error == math.inf


def test_whole_numbers_differ_by_the_share_of_elements() -> None:
    reference = Reference(torch.arange(8), BOUND)
    right, wrong = reference.relate(torch.arange(4, 8)), reference.relate(torch.tensor([4, 5, 6, 0]))
    assert right is not None
    assert wrong is not None
    assert (right.place, right.error) == ("dim 0: 4-7 of 8", 0.0)
    assert (wrong.place, wrong.error) == ("dim 0: 4-7 of 8", 0.25)


@pytest.mark.parametrize("shape", [(4,), (5, 5), (2, 3, 8)])
def test_no_part_has_another_shape(shape: tuple[int, ...]) -> None:
    assert Reference(WHOLE, BOUND).relate(make(*shape, seed=1)) is None

"""A rank's expected places of a tensor equal those of other tensors that it has a part of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeverify.explain.cuts import Cut, list_batch_cuts, list_cuts, take
from moeverify.explain.program import Program

PLACES = torch.arange(24).reshape(4, 6)


def read(cuts: list[Cut]) -> list[tuple[int, int, list[int]]]:
    return [(cut.dim, cut.size, cut.index.tolist()) for cut in cuts]


@pytest.mark.parametrize(
    ("part", "cuts"),
    [
        (PLACES[1:3], [(0, 4, [1, 2]), (1, 6, [0, 1, 2, 3, 4, 5])]),
        (PLACES[:, ::3], [(0, 4, [0, 1, 2, 3]), (1, 6, [0, 3])]),
        (PLACES[torch.tensor([3, 0])][:, 4:], [(0, 4, [3, 0]), (1, 6, [4, 5])]),
    ],
)
def test_a_block_is_cut_along_each_dimension(part: Tensor, cuts: list[tuple[int, int, list[int]]]) -> None:
    assert read(list(list_cuts(part, (4, 6)))) == cuts


def test_padding_and_a_few_equal_elements_are_no_objection() -> None:
    part = PLACES[1:3].clone()
    part[0, 5] = -1
    part[1, 0] = 7
    assert read(list(list_cuts(part, (4, 6))))[0] == (0, 4, [1, 2])


def test_what_is_no_block_is_not_cut() -> None:
    mixed = PLACES.reshape(-1)[torch.randperm(24, generator=torch.Generator().manual_seed(0))].reshape(4, 6)
    assert list(list_cuts(mixed, (4, 6))) == []
    assert list(list_cuts(PLACES, (24,))) == []
    assert list(list_cuts(torch.full((2, 6), -1), (4, 6))) == []


def test_a_tensor_is_cut_as_others_are() -> None:
    whole = PLACES.double()
    rows, columns = Cut(4, torch.tensor([2, 3]), 0), Cut(6, torch.tensor([0, 5]), 1)
    for shape, part in (((2, 6), whole[2:]), ((4, 2), whole[:, ::5]), ((2, 2), whole[2:, ::5])):
        found = take(whole, shape, [rows, columns])
        assert found is not None
        assert torch.equal(found, part)


def test_a_tensor_that_is_whole_is_not_cut() -> None:
    found = take(PLACES, (4, 6), [Cut(4, torch.tensor([2, 3]), 0)])
    assert found is not None
    assert torch.equal(found, PLACES)
    flat = take(PLACES, (24,), [])
    assert flat is not None
    assert torch.equal(flat, PLACES.reshape(24))


def test_nothing_says_how_to_cut() -> None:
    assert take(PLACES, (3, 6), [Cut(4, torch.tensor([2, 3]), 0)]) is None
    assert take(PLACES, (2, 6), [Cut(5, torch.tensor([2, 3]), 0)]) is None
    assert take(PLACES, (12,), []) is None


def test_the_cut_of_the_same_dimension_is_better() -> None:
    square = torch.arange(16).reshape(4, 4)
    first, second = Cut(4, torch.tensor([0, 1]), 0), Cut(4, torch.tensor([2, 3]), 1)
    for cuts in ([first, second], [second, first]):
        found = take(square, (2, 4), cuts)
        assert found is not None
        assert torch.equal(found, square[:2])
        found = take(square, (4, 2), cuts)
        assert found is not None
        assert torch.equal(found, square[:, 2:])


def test_rows_and_positions_of_a_batch_are_cuts_even_where_they_are_flattened() -> None:
    one = Program(shares=[((0, 1), range(3)), ((2, 3), range(3))])
    rank = Program(shares=[((0,), range(3)), ((3,), (0, 2))])
    assert read(list(list_batch_cuts(one, rank, 1))) == [
        (-1, 4, [3]),
        (-1, 3, [0, 2]),
        (-1, 12, [9, 11]),
    ]
    assert read(list(list_batch_cuts(one, rank, 2)))[0] == (-1, 4, [0]), "each step has these micro-batches"
    assert list(list_batch_cuts(one, Program(), 0)) == []
    tokens = torch.arange(12)
    found = take(tokens, (2,), list(list_batch_cuts(one, rank, 1)))
    assert found is not None
    assert found.tolist() == [9, 11]
    heads = torch.arange(24)  # two heads of each token, flattened
    found = take(heads, (4,), list(list_batch_cuts(one, rank, 1)))
    assert found is not None
    assert found.tolist() == [18, 19, 22, 23]

"""Definitions of collectives: readable examples, and an identity that every backward must satisfy."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeverify.results.collective_name import CollectiveName
from moeverify.results.collective_run import CollectiveRun, RankOutput, Transfer, flatten
from moeverify.verification.collectives.definition import TAKES_SPLITS, define_transfer

sizes_of = st.integers(0, 5)


def _draw_sizes(data: st.DataObject, collective: CollectiveName, num_ranks: int) -> list[list[int]]:
    row = st.lists(sizes_of, min_size=num_ranks, max_size=num_ranks)
    if TAKES_SPLITS.get(collective) == 2:
        return data.draw(st.lists(row, min_size=num_ranks, max_size=num_ranks))
    if collective in TAKES_SPLITS:
        return [data.draw(row)]
    return [[data.draw(st.integers(1, 5))] * num_ranks]


@pytest.mark.parametrize("collective", CollectiveName)
@settings(deadline=None)  # a busy machine is no failure
@given(data=st.data(), num_ranks=st.integers(1, 5))
def test_the_backward_is_the_transpose_of_the_forward(
    collective: CollectiveName, data: st.DataObject, num_ranks: int
) -> None:
    """Over all ranks <output, its gradient> equals <input, its gradient>: <A x, w> = <x, A' w>."""
    source = data.draw(st.integers(0, num_ranks - 1))
    transfer = define_transfer(collective, _draw_sizes(data, collective, num_ranks), source)
    forward = sum(_dot(rank.output, rank.output_gradient) for rank in transfer.ranks)
    backward = sum(_dot(rank.input, rank.input_gradient) for rank in transfer.ranks)
    assert forward == backward
    for mine in transfer.ranks:
        assert mine.sends == tuple(len(part.values) for part in mine.input)
        assert mine.receives == tuple(len(part.values) for part in mine.output)
        assert len(flatten(mine.input_gradient)) == sum(mine.sends)


def _dot(left: object, right: object) -> float:
    return sum(a * b for a, b in zip(flatten(left), flatten(right), strict=True))  # type: ignore[arg-type]


def _outputs(transfer: Transfer) -> list[tuple[float, ...]]:
    return [flatten(rank.output) for rank in transfer.ranks]


def test_an_uneven_exchange_by_hand() -> None:
    transfer = define_transfer(CollectiveName.ALL_TO_ALL, [[1, 0, 2], [0, 1, 1], [2, 1, 0]])
    assert [flatten(rank.input) for rank in transfer.ranks] == [(0, 1, 2), (100, 101), (200, 201, 202)]
    assert _outputs(transfer) == [(0, 200, 201), (100, 202), (1, 2, 101)]
    assert [rank.receives for rank in transfer.ranks] == [(1, 0, 2), (0, 1, 1), (2, 1, 0)]
    assert flatten(transfer.ranks[0].input_gradient) == (0, 200, 201)


def test_sums_by_hand() -> None:
    scattered = define_transfer(CollectiveName.REDUCE_SCATTER, [[2, 1]])
    assert _outputs(scattered) == [(100, 102), (104,)]
    assert [flatten(rank.input_gradient) for rank in scattered.ranks] == [(0, 1, 100)] * 2
    assert scattered.padded_to == 2
    assert _outputs(define_transfer(CollectiveName.ALL_REDUCE, [[2, 2, 2]])) == [(300, 303)] * 3


def test_a_broadcast_has_a_gradient_at_its_source_alone() -> None:
    transfer = define_transfer(CollectiveName.BROADCAST, [[2, 2, 2]], source=1)
    assert _outputs(transfer) == [(100, 101)] * 3
    assert [flatten(rank.input_gradient) for rank in transfer.ranks] == [(0, 0), (300, 303), (0, 0)]


def test_no_two_elements_have_the_same_number() -> None:
    transfer = define_transfer(CollectiveName.ALL_TO_ALL, [[64] * 4] * 4)
    numbers = list(itertools.chain.from_iterable(flatten(rank.input) for rank in transfer.ranks))
    assert len(set(numbers)) == len(numbers) == 4 * 4 * 64


@pytest.mark.parametrize(
    ("output", "gradient"), [((0, 0, 100, 102), None), ((0, 1, 100, 101), (1, 0)), ((0, 1, 100), None)]
)
def test_a_rank_that_got_something_else_is_named(
    output: tuple[float, ...], gradient: tuple[float, ...] | None
) -> None:
    transfer = define_transfer(CollectiveName.ALL_GATHER, [[2, 2]])
    right = RankOutput(rank=0, output=(0, 1, 100, 101))
    values = (right, RankOutput(rank=1, output=output, input_gradient=gradient))
    assert CollectiveRun(transfer=transfer, values=values, environment={}).wrong_ranks == (1,)
    assert CollectiveRun(transfer=transfer, values=(right, right), environment={}).wrong_ranks == ()

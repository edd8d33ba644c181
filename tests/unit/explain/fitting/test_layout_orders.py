"""Values in another layout's order: each mistake is made with torch's own reshapes, and must be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw, examine, make_inputs, make_sharded

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.layouts.orders import Grid, list_orders, list_turns, locate
from moeverify.report.words.observation import describe_observation
from moeverify.results.cause import Cause
from moeverify.results.factor import Source
from moeverify.results.layout import Dim, Order

CONTEXT = Axes({"cp": [[0, 1]]}, [Source(name="cp", size=2)])


def name(order: Order) -> tuple[str, str]:
    return order.way, " ".join(f"{dim.name}{dim.size}" for dim in order.dims)


EXPECTED = draw(12, 6)


def make(*parts: Tensor) -> Any:
    tensor = make_sharded(EXPECTED, *parts, kind="initial_weight")
    heads = [Source(name="heads", size=4)]
    return examine("reordered", tensor, make_inputs(tensor, axes=replace(CONTEXT, module_counts=heads)))


WEIGHTS = [
    (lambda w: w.T.reshape(w.shape), ("stored", "columns6 rows12")),
    (lambda w: w.unflatten(0, (2, 6)).transpose(0, 1).flatten(0, 1), ("stored", "rows6 parts2 columns6")),
    (lambda w: w.unflatten(0, (3, 4)).roll(1, 0).flatten(0, 1), ("rolled", "parts3")),
    (lambda w: w.unflatten(1, (2, 3)).flip(1).flatten(1), ("reversed", "parts2")),
    (lambda w: w.unflatten(0, (3, 4))[:1].expand(3, 4, 6).reshape(w.shape), ("same", "parts3")),
]


@pytest.mark.parametrize(("change", "named"), WEIGHTS)
def test_weights_in_another_layout(change: Callable[[Tensor], Tensor], named: tuple[str, str]) -> None:
    outcome = make(*change(EXPECTED).chunk(2))
    assert outcome.explanation is not None
    assert name(outcome.explanation.operation.orders[0]) == named
    assert outcome.explanation.cause is (Cause.DUPLICATE if named[0] == "same" else Cause.PERMUTATION)
    assert ["gives every value" in describe_observation(one) for one in outcome.observations] == [True]


def test_ranks_that_are_right_are_spared() -> None:
    explanation = make(EXPECTED[:6], EXPECTED[6:].flip(0)).explanation
    assert explanation is not None
    assert explanation.operation.ranks == (1,)


def test_heads_are_called_by_their_name() -> None:
    explanation = make(*EXPECTED.unflatten(0, (4, 3)).flip(0).flatten(0, 1).chunk(2)).explanation
    assert explanation is not None
    assert name(explanation.operation.orders[0]) == ("reversed", "heads4")


@pytest.mark.parametrize(
    "actual",
    [
        EXPECTED,
        draw(12, 6, seed=1),
        2.0 * EXPECTED,
        torch.zeros_like(EXPECTED),
        EXPECTED.flip(1) + 1e-6,
        torch.cat([EXPECTED.flip(1)[:-1], EXPECTED.flip(1)[-1:] * 1.001]),  # except for one row
        EXPECTED[:, torch.tensor([3, 1, 5, 0, 2, 4])],  # an order outside the grammar
    ],
)
def test_other_values_have_no_order(actual: Tensor) -> None:
    assert make(*actual.chunk(2)).explanation is None


@pytest.mark.parametrize(("largest", "is_known"), [(1.0, True), (1000.0, False)])
def test_rounded_values_are_known_where_their_errors_are_far_larger_than_rounding(
    largest: float, is_known: bool
) -> None:
    # Two rows that swap places, with a number so large that the change is not much more than rounding.
    expected = draw(12, 6).clamp(-1.0, 1.0)
    expected[0, 0] = expected[11, 0] = largest
    actual = expected.flip(0).to(torch.float32).to(torch.float64)
    tensor = make_sharded(expected, *actual.chunk(2), kind="initial_weight", precision=torch.float32)
    outcome = examine("reordered", tensor, make_inputs(tensor, axes=CONTEXT))
    assert (outcome.explanation is not None) == is_known


def test_every_order_is_one_of_all_places() -> None:
    """An order of dims moves every value; turns along a dim do too, except those that copy one part."""
    grid = Grid((Dim(name="experts", size=2), Dim(name="rows", size=6), Dim(name="columns", size=3)))
    grid = grid.take_apart(1, Dim(name="parts", size=2, of="rows"), "rows")
    places = torch.arange(36)
    orders = [*list_orders(grid), *list_turns(grid, 1), *list_turns(grid, 3)]
    assert len(orders) > 40
    for order in orders:
        is_all = torch.equal(locate(order, places).sort().values, places)
        assert is_all == (order.way != "same")
    assert all(one != other for one, other in pairwise(orders))

"""Tests of the search for the operators that create wrong integers and masks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from generated import explain_call, read
from recordings import make
from torch import Tensor

from moeverify.results.culprit import Culprit

Call = Callable[..., Tensor]


def turn(x: Tensor, places: Tensor) -> Tensor:
    return (x * torch.cos(places[:, None].to(torch.float64) * 0.3)).sin()


def turn_by(x: Tensor, make_places: Callable[[], Tensor]) -> Tensor:
    return turn(x, make_places())


def mask(x: Tensor, ids: Tensor) -> Tensor:
    return x.masked_fill(ids[:, None] < 2, 0.5).sin()


def attend(q: Tensor, k: Tensor, v: Tensor, own: Tensor, keys: Tensor) -> Tensor:
    hidden = own[:, None] < keys
    return (q @ k.T).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def in_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, torch.arange(8), torch.arange(8))


def in_other_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    order = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])
    return attend(q, k[order], v[order], torch.arange(8), torch.arange(4 * 2))


IDS = torch.tensor([0, 3, 1, 2, 2, 0, 1, 3])
X: dict[str, Any] = {"x": make(8, 4)}
HEADS: dict[str, Any] = {"q": make(8, 4), "k": make(8, 4, seed=1), "v": make(8, 4, seed=2)}


@pytest.mark.parametrize(
    ("ranks", "one", "inputs", "line"),
    [
        pytest.param(
            lambda x: turn_by(x, lambda: torch.cat([torch.arange(4), torch.arange(5, 9)])),
            lambda x: turn_by(x, lambda: torch.arange(8)),
            X,
            "torch.arange(5, 9)",
            id="one of two parts",
        ),
        pytest.param(
            lambda x: turn(x, (torch.arange(8) * 3)[(torch.arange(8) + 1) % 8]),
            lambda x: turn(x, torch.arange(8) * 3),
            X,
            "(torch.arange(8) + 1) % 8",
            id="index of a right table",
        ),
        pytest.param(
            lambda x, ids: mask(x, ids.flip(0)),
            mask,
            X | {"ids": IDS},
            "ids.flip(0)",
            id="order of right elements",
        ),
        pytest.param(
            lambda x, ids: mask(x, (ids - 1).cumsum(0)),
            lambda x, ids: mask(x, (ids * 1).cumsum(0)),
            X | {"ids": IDS},
            "ids - 1",
            id="operand of a whole operator",
        ),
        pytest.param(in_other_order, in_order, HEADS, "torch.arange(4 * 2)", id="keys in another order"),
    ],
)
def test_the_operator_that_creates_wrong_elements_is_the_place(
    ranks: Call, one: Call, inputs: dict[str, Tensor], line: str
) -> None:
    culprit = find(ranks, one, inputs)
    assert (culprit.mechanism, culprit.proved, culprit.names_cause) == ("created", True, False)
    assert read(culprit.here) == line
    assert len(culprit.numbers) == 1


def test_elements_that_are_right_for_another_operation_are_wrong_where_they_are_taken() -> None:
    def run(x: Tensor, ids: Tensor, other: Tensor) -> Tensor:
        return mask(x, ids) + mask(x.cos(), other)

    culprit = find(
        lambda x, ids: run(x, places := ids.cumsum(0), places),
        lambda x, ids: run(x, ids.cumsum(0), ids.flip(0)),
        X | {"ids": IDS},
    )
    assert culprit.mechanism != "created"


def test_masks_that_are_added_are_not_subtracted() -> None:
    def run(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
        return (q @ k.T).masked_fill(hidden, -1e9).softmax(-1)

    places = torch.arange(8)
    culprit = find(
        lambda q, k: run(q, k, (places[:, None] < places) + (IDS == 1)[:, None]),
        lambda q, k: run(q, k, places[:, None] < places),
        {"q": HEADS["q"], "k": HEADS["k"]},
    )
    assert (culprit.mechanism, read(culprit.here)) == (
        "created",
        "(places[:, None] < places) + (IDS == 1)[:, None]",
    )


def find(ranks: Call, one: Call, inputs: dict[str, Tensor]) -> Culprit:
    """Return the first culprit of a call that differs from one device."""
    culprit, *_ = explain_call(ranks, one, **inputs)
    return culprit

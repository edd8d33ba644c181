"""Initial values of which only the largest are others: what these are, and where they begin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from wrong_tensors import examine, make_inputs, make_sharded, make_tensor

from moeverify.diagnose.tails import find_tails
from moeverify.diagnose.wrong_tensor import WrongTensor

SIZES = {"a": 4096, "b": 900, "c": 64}
DEVIATIONS = {"a": 0.02, "b": 0.5, "c": 0.1}


def draw(seed: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(
    change: Callable[[Tensor, Tensor], Tensor], *, dtype: torch.dtype = torch.float64
) -> list[WrongTensor]:
    """Return weights whose values `change` makes of the right ones, in deviations, and of others."""
    found = []
    for number, (name, count) in enumerate(SIZES.items()):
        right, again = draw(number, count), draw(10 + number, count)
        values = (DEVIATIONS[name] * change(right, again)).to(dtype).to(torch.float64)
        expected = (DEVIATIONS[name] * right).to(dtype).to(torch.float64)
        found.append(
            make_tensor(expected, values, name=name, kind="initial_weight", step=-1, precision=dtype)
        )
    return found


def redraw(right: Tensor, again: Tensor) -> Tensor:
    return torch.where(right.abs() > 2.0, again.clamp(-1.9, 1.9), right)


@pytest.mark.parametrize(
    ("change", "way", "deviations", "factor"),
    [
        (redraw, "drawn-again", 2.0, 1.0),
        (lambda right, again: redraw(right, again) / 0.88, "drawn-again", 2.0, 1.0 / 0.88),
        (lambda right, again: right.clamp(-1.5, 1.5), "cut-off", 1.5, 1.0),
        (lambda right, again: right.where(right.abs() < 2.0, 0.0), "zero", 2.0, 1.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_largest_are_others(
    change: Callable[[Tensor, Tensor], Tensor], way: str, deviations: float, factor: float, dtype: torch.dtype
) -> None:
    found = find_tails(make(change, dtype=dtype))
    assert found is not None
    assert (found.way, found.deviations) == (way, deviations)
    assert found.factor == pytest.approx(factor, rel=1e-5)
    assert found.num_elements == sum(SIZES.values())


def test_a_bound_that_is_one_number_for_all_is_that_number() -> None:
    right = [0.3 * draw(1, 500), 0.2 * draw(2, 500)]
    wrong = [make_tensor(each, each.clamp(-0.43, 0.43), kind="initial_weight", step=-1) for each in right]
    found = find_tails(wrong)
    assert found is not None
    assert (found.way, found.deviations) == ("cut-off", None)
    assert found.bound == pytest.approx(0.43, rel=0.02)


@pytest.mark.parametrize(
    "change",
    [
        lambda right, again: again,
        lambda right, again: torch.where(again > 1.6, again, right),  # others than the largest
        lambda right, again: torch.where(right.abs() > 2.0, 5.0 * right, right),  # larger than the bound
        lambda right, again: 1.1 * right,
        lambda right, again: torch.where(right > 2.0, 0.0, right).where(right > -2.0, 0.5 * right),
    ],
)
def test_other_changes_are_no_tails(change: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert find_tails(make(change)) is None


def test_one_value_is_no_evidence() -> None:
    right = draw(5, 100)
    assert find_tails([make_tensor(right, right.where(right.abs() < right.abs().max(), 0.0))]) is None


def test_slices_of_ranks_are_one_weight() -> None:
    right = draw(3, 2048).view(32, 64)
    wrong = right.clamp(-2.0, 2.0)
    tensor = make_sharded(right, *wrong.chunk(2), kind="initial_weight")
    explanation = examine("tails", tensor, make_inputs(tensor)).explanation
    assert explanation.operation.tails.way == "cut-off"


def test_ranks_that_differ_are_no_distribution() -> None:
    right = draw(3, 2048)
    tensor = make_tensor(right, right, right.clamp(-2.0, 2.0), kind="initial_weight", step=-1)
    assert examine("tails", tensor).explanation is None

"""Initial values of another deviation, and selection biases that move by another rule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from wrong_tensors import AXES, draw, examine, find_hypothesis, make_inputs, make_sharded, make_tensor

from moeverify.results.cause import Cause
from moeverify.results.factor import Source
from moeverify.results.operation import Scaled

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def store(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).to(torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("value", "power"), [(math.sqrt(2.0), 2), (0.5, 1), (math.sqrt(0.5), 2)])
def test_values_of_another_deviation_have_the_root_of_an_axis(
    value: float, power: int, dtype: torch.dtype
) -> None:
    expected = draw(16, 8)
    wrong = store(value * expected, dtype)
    tensor = make_sharded(
        store(expected, dtype), wrong[:8], wrong[8:], kind="initial_weight", precision=dtype
    )
    explanation = examine("scaled_values", tensor, make_inputs(tensor, axes=AXES)).explanation
    assert explanation.cause is Cause.SCALE
    assert isinstance(explanation.operation, Scaled)
    (whole,) = explanation.operation.contributions
    assert whole.factor.value == pytest.approx(value, rel=2 * torch.finfo(dtype).eps)
    assert whole.factor.power == power
    assert whole.factor.equals


SIZED = replace(AXES, module_counts=[Source(name="layers", size=3)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (6**-0.5, "residual branches (2 a layer)"),
        (3**0.5, "layers"),
        (24**-0.5, "rows of the weight"),
        (40**0.5, "columns of the weight"),
        (64**-0.5, "rows and columns of the weight"),
    ],
)
def test_values_that_are_scaled_by_depth_or_width_name_it(
    value: float, name: str, dtype: torch.dtype
) -> None:
    expected = store(draw(24, 40), dtype)
    tensor = make_tensor(expected, store(value * expected, dtype), kind="initial_weight", precision=dtype)
    explanation = examine("scaled_values", tensor, make_inputs(tensor, axes=SIZED)).explanation
    (whole,) = explanation.operation.contributions
    assert [product.sources for product in whole.factor.equals] == [(name,)]
    assert whole.factor.power == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_hardly_any_number_that_is_drawn_by_lot_gets_a_name(dtype: torch.dtype) -> None:
    expected = store(draw(24, 40), dtype)
    values = (torch.rand(100, generator=torch.Generator().manual_seed(0)).double() * 4.0 - 2.0).exp()
    named = 0
    for value in values.tolist():
        tensor = make_tensor(expected, store(value * expected, dtype), kind="initial_weight", precision=dtype)
        explanation = examine("scaled_values", tensor, make_inputs(tensor, axes=SIZED)).explanation
        named += explanation is not None and bool(explanation.operation.contributions[0].factor.equals)
    assert named <= 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_one_deviation_are_one_cause_and_those_of_two_are_not(dtype: torch.dtype) -> None:
    def scale(value: float, seed: int, name: str) -> object:
        expected = draw(8, 8, seed=seed)
        wrong = store(value * expected, dtype)
        return make_tensor(store(expected, dtype), wrong, name=name, kind="initial_weight", precision=dtype)

    hypothesis = find_hypothesis("scaled_values")
    alike = [scale(1.3, 1, "a"), scale(1.3, 2, "b")]
    assert hypothesis.test(alike, make_inputs(*alike)).explanation is not None
    other = [scale(1.3, 1, "a"), scale(1.4, 2, "b")]
    assert hypothesis.test(other, make_inputs(*other)).explanation is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_another_seed_and_one_wrong_element_are_no_multiple(dtype: torch.dtype) -> None:
    expected = store(draw(8, 8), dtype)
    touched = store(1.5 * expected, dtype)
    touched[3, 3] *= 1.5
    for wrong in (store(draw(8, 8, seed=1), dtype), touched, torch.zeros_like(expected), -expected):
        tensor = make_tensor(expected, wrong, kind="initial_weight", precision=dtype)
        assert examine("scaled_values", tensor).explanation is None
    few = make_tensor(expected[0, :2].clone(), 2.0 * expected[0, :2], kind="initial_weight", precision=dtype)
    assert examine("scaled_values", few).explanation is None

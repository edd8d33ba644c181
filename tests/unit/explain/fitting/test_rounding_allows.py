"""Limits of rounding: no factor beyond its standard error, no few tokens, no module off by many units."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw, find_hypothesis, make_inputs, make_origin, make_tensor

from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor


def make_products(number: int, how: Callable[[Tensor], Tensor], *, factor: float = 1.0) -> list[WrongTensor]:
    """Return gradients of linear layers, computed from products with changed factors."""
    tensors = []
    for at in range(number):
        came, went = draw(96, 16, seed=2 * at), draw(96, 8, seed=2 * at + 1)
        actual = factor * how(came).T @ how(went)
        tensors.append(make_tensor(came.T @ went, actual, name=f"layers.{at}.w"))
    return tensors


def is_rounding(tensors: list[WrongTensor], inputs: DiagnosisInputs | None = None) -> bool:
    return find_hypothesis("rounding").test(tensors, inputs or make_inputs(*tensors)) is not None


def to_bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_rounded_numbers_are_rounding(dtype: torch.dtype) -> None:
    assert is_rounding(make_products(12, lambda values: values.to(dtype).double()))


@pytest.mark.parametrize("factor", [0.99, 1.003, 1.01])
def test_a_factor_beyond_its_standard_error_is_no_rounding(factor: float) -> None:
    """Also where it is less than half of the error."""
    assert not is_rounding(make_products(12, to_bfloat16, factor=factor))
    noise = [0.02 * draw(64, 8, seed=n + 1) for n in range(12)]
    assert not is_rounding([make_tensor(draw(64, 8), factor * draw(64, 8) * (1 + each)) for each in noise])
    assert is_rounding([make_tensor(draw(64, 8), draw(64, 8) * (1 + each)) for each in noise])


def test_a_factor_that_small_tensors_share_is_no_rounding() -> None:
    def make(factor: float) -> list[WrongTensor]:
        pairs = [(draw(8, 8, seed=n), draw(8, 8, seed=n + 100)) for n in range(60)]
        return [make_tensor(right, factor * right * (1 + 0.012 * noise)) for right, noise in pairs]

    assert is_rounding(make(1.0))
    assert sum(is_rounding([each]) for each in make(1.004)) > 45  # a single one shows it seldom
    assert not is_rounding(make(1.004))


def test_a_few_tokens_that_are_off_among_sums_in_another_order_are_no_rounding() -> None:
    expected = draw(64, 8)
    noise = 1e-7 * draw(64, 8, seed=1)
    few = noise.clone()
    few[:2] = 0.05 * draw(2, 8, seed=2)
    assert not is_rounding([make_tensor(expected, expected * (1 + few))])


@pytest.mark.parametrize(("size", "is_so"), [(0.003, True), (0.06, False)])
def test_a_module_that_is_off_by_many_units_did_not_round(size: float, is_so: bool) -> None:
    """Although its consequences are off by less."""
    gradients = make_products(12, to_bfloat16)
    right = draw(2, 32, 16)
    _, inputs = make_origin(right, right * (1 + size * draw(2, 32, 16, seed=1)), direction="backward")
    assert is_rounding(gradients, inputs) is is_so

"""Initial values that one rule of the shapes scales, by another factor in each weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from wrong_tensors import AXES, draw, make_inputs, make_tensor

from moeverify.diagnose.initial_values import explain_initial_values
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.initial_values import ScaledByShape
from moeverify.results.operation import Operation, Scaled

SHAPES = [(64, 32), (16, 32), (4, 64, 32), (4, 32, 64), (96, 32), (2, 32)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def scale(rule: Callable[[int, int], float], dtype: torch.dtype = torch.float64) -> list[Operation | None]:
    """Return what is said of weights of several shapes that are scaled by a rule of their rows and columns."""
    tensors: list[WrongTensor] = []
    for number, shape in enumerate(SHAPES):
        expected = draw(*shape).to(dtype).to(torch.float64)
        wrong = (rule(shape[-2], shape[-1]) * expected).to(dtype).to(torch.float64)
        name = f"layers.{number}.weight{number}"
        tensors.append(make_tensor(expected, wrong, name=name, kind="initial_weight", precision=dtype))
    causes = explain_initial_values(tensors, make_inputs(*tensors, axes=AXES))
    return [None if cause.explanation is None else cause.explanation.operation for cause in causes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rule", "times", "over", "power"),
    [
        (lambda rows, columns: (columns / rows) ** 0.5, "columns of the weight", "rows of the weight", 2),
        (lambda rows, columns: rows / columns, "rows of the weight", "columns of the weight", 1),
        (
            lambda rows, columns: (2.0 * columns / (rows + columns)) ** 0.5,
            "columns of the weight",
            "half of the rows and columns of the weight",
            2,
        ),
        (lambda rows, columns: rows**-0.5, "", "rows of the weight", 2),
    ],
)
def test_one_rule_of_the_shapes_is_named_for_all(
    rule: Callable[[int, int], float], times: str, over: str, power: int, dtype: torch.dtype
) -> None:
    (operation,) = scale(rule, dtype)
    assert isinstance(operation, ScaledByShape)
    assert [(each.times, each.over) for each in operation.products] == [((times,) if times else (), (over,))]
    assert operation.power == power


def test_one_factor_of_all_weights_is_no_rule_of_their_shapes() -> None:
    (operation,) = scale(lambda rows, columns: 2.0**0.5)
    assert isinstance(operation, Scaled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_that_no_rule_gives_are_told_one_by_one(dtype: torch.dtype) -> None:
    told = scale(lambda rows, columns: 1.0 + 0.013 * rows + 0.0007 * rows * columns, dtype)
    assert all(isinstance(operation, Scaled) for operation in told)
    assert len(told) > 3


def test_what_fits_two_shapes_of_many_is_no_rule() -> None:
    told = scale(lambda rows, columns: (columns / rows) ** 0.5 if rows < 30 else 1.7)
    assert not any(isinstance(operation, ScaledByShape) for operation in told)

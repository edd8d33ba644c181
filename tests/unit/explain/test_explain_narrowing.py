"""Values that ranks alone keep in a narrow dtype, found by executing the program with a wide one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recordings import list_ops, make, record_call
from torch import Tensor

from moeverify.explain.culprits import Culprits
from moeverify.explain.explain import Explainer
from moeverify.results.cause import Cause


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(dtype).exp() * 0.5).to(torch.float64).cumsum(0)


def cast_both(x: Tensor, dtype: torch.dtype) -> Tensor:
    scores = (x.to(dtype) @ x.sin().to(dtype).T).softmax(-1)
    return scores.to(torch.float64) * 2


def fill(x: Tensor, dtype: torch.dtype) -> Tensor:
    memory = torch.zeros(x.shape, dtype=dtype)
    memory[1:] = x[1:].sin()
    return memory.to(torch.float64).exp()


def leave_uninitialized(x: Tensor, dtype: torch.dtype) -> Tensor:
    memory = torch.empty(x.shape, dtype=dtype)
    memory.copy_(x.cos())
    return memory * x


def rotate(x: Tensor, dtype: torch.dtype) -> Tensor:
    rates = 10_000 ** (-torch.arange(x.shape[1], dtype=dtype) / x.shape[1])
    return (x * rates).sin()


def explain(
    function: Callable[..., Tensor], on_ranks: torch.dtype, on_one: torch.dtype = torch.float64
) -> Explainer:
    ranks, one = (
        record_call(lambda x, dtype=dtype: function(x, dtype), None, x=make(6, 4))
        for dtype in (on_ranks, on_one)
    )
    return Explainer([ranks], one, 0, ())


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (cast, "_to_copy"),
        (cast_both, "_to_copy"),
        (fill, "zeros"),
        (leave_uninitialized, "empty"),
        (rotate, "arange"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_that_chooses_a_narrow_dtype_is_named(
    function: Callable[..., Tensor], name: str, dtype: torch.dtype
) -> None:
    explainer = explain(function, dtype)
    (cause,) = explainer.explain(10)
    assert cause.ops == [(0, list_ops(explainer.joint.programs[0], name)[0].number)]
    culprit = Culprits(explainer).make(cause)
    assert culprit.mechanism == "dtype"
    assert culprit.code == Cause.ROUNDING
    assert culprit.rounds_to == str(dtype).removeprefix("torch.")
    assert culprit.proved
    assert culprit.repaired == ("loss/total",)
    assert culprit.residual is not None
    assert culprit.residual < 1e-14


@pytest.mark.parametrize("function", [cast, fill, rotate])
def test_a_dtype_that_one_device_has_at_the_line_too_is_right(function: Callable[..., Tensor]) -> None:
    assert not explain(function, torch.float32, torch.float32).explain(10)


def test_a_narrow_value_without_effect_is_not_blamed_for_another_mistake() -> None:
    def run(x: Tensor, dtype: torch.dtype) -> Tensor:
        ones = torch.ones(x.shape, dtype=dtype)
        return x.sin() * ones * (1.0 if dtype == torch.float64 else 1.25)

    causes = explain(run, torch.float32).explain(10)
    assert causes
    assert all(edit.kind != "dtype" for cause in causes for edit in cause.repairs)


def test_a_narrow_dtype_beside_another_mistake_is_no_proved_cause() -> None:
    def run(x: Tensor, dtype: torch.dtype) -> Tensor:
        y = cast(x, dtype)
        return y if dtype == torch.float64 else y.flip(0)

    causes = explain(run, torch.float32).explain(10)
    assert all(edit.kind != "dtype" for cause in causes for edit in cause.repairs)

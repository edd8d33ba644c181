"""Factors near 1 that are what rounding makes of a known number, and reported numbers of few bits."""

from __future__ import annotations

import pytest
import torch
from wrong_tensors import draw, make_inputs, make_tensor

from moeverify.case.presets import PRESETS
from moeverify.case.schema import ReferenceModel
from moeverify.diagnose.axes import Axes
from moeverify.diagnose.engine import DiagnosedCause
from moeverify.diagnose.rounded_numbers import list_numbers, name_rounded
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, RoundedNumber, Source
from moeverify.results.operation import Scaled
from moeverify.results.part import Contribution, Part

NUMBERS = {"balance": 0.02, "z": 0.001, "clip": 0.137, "valid": 1.0 / 349.0}


def to(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def ask(factor: float, actual: float | None = None, precision: torch.dtype = torch.float64) -> Factor:
    """Return the factor as it is named: of a gradient's term, or of a reported loss whose golden is 2.3456."""
    golden = draw(3) if actual is None else torch.tensor(2.3456789, dtype=torch.float64)
    values = golden * factor if actual is None else torch.tensor(actual, dtype=torch.float64)
    kind = "gradient" if actual is None else "loss"
    tensor = make_tensor(golden, values, kind=kind, precision=precision)
    quantity = Quantity.GRADIENT if actual is None else Quantity.LOSS
    part = Part(term="z") if actual is None else Part()
    explanation = Explanation(
        cause=Cause.SCALE,
        subject=Subject(quantity=quantity, tensors=(tensor.name,)),
        operation=Scaled(contributions=(Contribution(part=part, factor=Factor(value=factor)),)),
    )
    inputs = make_inputs(tensor, numbers=NUMBERS, axes=Axes({}, [Source(name="dp", size=3)]))
    named = name_rounded(DiagnosedCause((tensor,), explanation, tensor), inputs).explanation
    assert named is not None
    assert isinstance(named.operation, Scaled)
    return named.operation.contributions[0].factor


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("times", [1, 3])
def test_a_number_that_was_rounded_is_named(name: str, dtype: torch.dtype, times: int) -> None:
    value = NUMBERS[name] * times
    found = ask(to(value, dtype) / value).rounded
    assert found == RoundedNumber(name=name, dtypes=(str(dtype).removeprefix("torch."),))


@pytest.mark.parametrize("factor", [1.0 + 2.0**-9, 1.0 + 4.7e-8, 0.999, 1.02])
def test_a_factor_near_one_is_no_rounding_by_its_size(factor: float) -> None:
    assert ask(factor).rounded is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_reported_number_of_few_bits_was_rounded(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    parts = [to(value, dtype) for value in (1.0456789, 1.3)]
    for actual in (to(2.3456789, dtype), sum(parts), 0.02 * to(2.3456789 / 0.02, dtype)):
        assert ask(actual / 2.3456789, actual).rounded == RoundedNumber(dtypes=(name,))


def test_a_reported_number_that_two_dtypes_may_have_made_is_said_to_be_of_either() -> None:
    value = to(2.3456789, torch.float16)  # 2.345703125, ten bits
    assert ask(value / 2.3456789, value).rounded == RoundedNumber(dtypes=("bfloat16", "float16"))


def test_a_reported_number_of_all_bits_was_not() -> None:
    for factor in (1.001, 1.0 + 1e-8, 1.01):
        assert ask(factor, 2.3456789 * factor).rounded is None


def test_below_float64_everything_is_rounded_and_nothing_is_said() -> None:
    assert ask(to(0.001, torch.bfloat16) / 0.001, precision=torch.float32).rounded is None


def test_the_numbers_of_a_recipe() -> None:
    model = ReferenceModel(**PRESETS["stress"])
    valid = torch.tensor([[True, True], [True, False]])
    found = list_numbers(model, torch.tensor(0.25), valid)
    assert found == {"clip": 0.25, "balance": 0.02, "z": 0.001, "valid": 1.0 / 3.0, "z-valid": 0.001 / 3.0}
    assert list_numbers(None, None, None) == {}

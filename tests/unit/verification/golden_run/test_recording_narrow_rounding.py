"""Rounding to narrow dtypes inside a float64 computation moves by one unit; nothing else changes."""

from __future__ import annotations

import pytest
import torch

from moeverify.verification.golden_run.narrow_rounding import MovedFloat8, MovedRoundings, move_nearest


def test_a_conversion_comes_out_one_unit_off_in_both_directions() -> None:
    values = torch.linspace(0.5, 1.5, 64, dtype=torch.float64)
    rounded = values.float()
    with MovedRoundings(seed=0) as moved:
        found = values.float()
    steps = (found - rounded) / (torch.nextafter(rounded, torch.full_like(rounded, 9.0)) - rounded)
    assert set(steps.round(decimals=1).tolist()) == {-1.0, 1.0} | ({-0.5} & set(steps.tolist()))
    assert moved.num_conversions == 1


def test_what_is_not_float64_stays() -> None:
    angles = torch.linspace(0.0, 1.0, 8)  # RoPE's angles are float32 on every rank alike
    with MovedRoundings(seed=0) as moved:
        assert torch.equal(angles.double().float() * 0 + angles, angles)
        assert torch.equal(angles.to(torch.bfloat16), angles.bfloat16())
        assert torch.equal((angles.double() + 1).double(), angles.double() + 1)
    assert moved.num_conversions == 1


def test_the_backward_pass_of_a_conversion_is_reached() -> None:
    values = torch.linspace(0.5, 1.5, 64, dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad((values.float().double() ** 2).sum(), values)
    with MovedRoundings(seed=0) as moved:
        (found,) = torch.autograd.grad((values.float().double() ** 2).sum(), values)
    assert 1e-9 < (found - plain).norm() / plain.norm() < 1e-6
    assert moved.num_conversions == 2  # float64 gradients are converted to float32 on the way back


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_one_number_goes_to_the_other_side_of_the_middle_between_two(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8) * torch.logspace(-6, 2, 8)
    rounded = x.to(dtype)
    moved = move_nearest(x, rounded)
    ((row, column),) = (moved.float() != rounded.float()).nonzero().tolist()
    lower, upper = sorted((float(rounded[row, column]), float(moved[row, column])))
    assert lower < x[row, column] < upper
    middle = abs(float(x[row, column]) - (lower + upper) / 2) / (upper - lower)
    assert middle < 0.05
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    assert not ((grid > lower) & (grid < upper)).any(), "no other number lies between the two"


def test_zeros_and_what_is_beyond_the_range_stay() -> None:
    x = torch.tensor([0.0, 500.0, -1e9])
    rounded = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(move_nearest(x, rounded).float(), rounded.float())


def test_conversions_to_float8_alone_are_moved() -> None:
    x = torch.randn(64)
    with MovedFloat8():
        assert torch.equal(x.to(torch.bfloat16), x.bfloat16())
        found = x.to(torch.float8_e4m3fn)
    assert int((found.float() != x.to(torch.float8_e4m3fn).float()).sum()) == 1

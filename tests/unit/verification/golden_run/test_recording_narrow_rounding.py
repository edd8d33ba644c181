"""Rounding to narrow dtypes inside a float64 computation moves by one unit; nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moeverify.verification.golden_run.narrow_rounding import (
    MovedFloat8,
    MovedRoundings,
    NarrowPartsWatch,
    move_nearest,
)


def test_a_conversion_comes_out_one_unit_off_in_both_directions() -> None:
    values = torch.linspace(0.5, 1.5, 63, dtype=torch.float64)
    rounded = values.float()
    with MovedRoundings(0, [values]) as moved:
        found = values.float()
    steps = (found - rounded) / (torch.nextafter(rounded, torch.full_like(rounded, 9.0)) - rounded)
    assert {float(step.sign()) for step in steps} == {-1.0, 1.0} | ({0.0} if 1.0 in rounded else set())
    assert steps.abs().max() <= 1.0
    assert moved.num_found == 1


def test_values_without_a_parameter_and_exact_ones_stay() -> None:
    weight = torch.rand(8, dtype=torch.float64)
    places = torch.arange(8, dtype=torch.float64)
    with MovedRoundings(0, [weight]) as moved:
        assert torch.equal((places * 0.1).float().cos(), (places * 0.1).float().cos()), "RoPE's angles"
        assert torch.equal((weight + 1).double(), weight + 1)
        assert moved.num_found == 0
        assert torch.equal((weight * 0 + 3).float(), torch.full((8,), 3.0)), "a count is exact"
        found = weight.float()
        copied = torch.cat([found, found])
        assert torch.equal(copied[:8], found)
    assert moved.num_found == 2


def test_operators_in_a_narrow_dtype_round_too() -> None:
    weight = torch.rand(8, dtype=torch.float64).float()
    with MovedRoundings(0, [weight]) as moved:
        found = weight * 1.1
    assert not torch.equal(found, weight * 1.1)
    assert torch.allclose(found, weight * 1.1, rtol=3e-7)
    assert moved.num_found == 1


def test_the_backward_pass_of_a_conversion_is_reached() -> None:
    values = torch.linspace(0.5, 1.5, 64, dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad((values.float().double() ** 2).sum(), values)
    with MovedRoundings(0, [values]) as moved:
        (found,) = torch.autograd.grad((values.float().double() ** 2).sum(), values)
    assert 1e-9 < (found - plain).norm() / plain.norm() < 1e-6
    assert moved.num_found == 2  # float64 gradients are converted to float32 on the way back


def test_narrow_parts_are_named_by_their_innermost_module() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            return (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(x.dtype)

    model = nn.Sequential(nn.Linear(4, 4), Norm(), nn.Linear(4, 4)).double()
    parts = NarrowPartsWatch(model, model.parameters())
    with parts.noting():
        model(torch.rand(2, 4, dtype=torch.float64)).sum().backward()
    assert parts.found == {"1": torch.float32}
    with parts.noting():
        model(torch.rand(2, 4, dtype=torch.float64)).bfloat16().sum().backward()
    assert parts.found == {"1": torch.float32, "": torch.bfloat16}


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

"""Rounding to narrow dtypes inside a float64 computation is moved by one unit, and nothing else is."""

from __future__ import annotations

import torch

from moeverify.recording.narrow_rounding import MovedRoundings


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

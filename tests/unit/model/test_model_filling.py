"""Padding rows after those of the experts, as left by an exchange of fixed sizes, with any contents."""

from __future__ import annotations

import pytest
import torch

from moeverify.model.expert_backends import EXPERTS
from moeverify.model.expert_weights import ExpertWeights


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_filling_reaches_no_output_and_no_gradient(backend: str) -> None:
    multiply = EXPERTS.find(backend).multiply
    assert multiply is not None
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 8, 4), (3, 8, 4), (3, 4, 8), (3, 8), (3, 8), (3, 4)]
    weights = ExpertWeights(*(torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes))
    rows, slope = (torch.randn(9, 4, generator=generator) for _ in range(2))
    counts, num_counted = torch.tensor([2, 0, 4]), 6

    def run(x: torch.Tensor, upward: torch.Tensor) -> list[torch.Tensor]:
        x = x.requires_grad_()
        outputs = multiply(x, counts, weights)
        found = torch.autograd.grad(outputs, [x, *weights], upward)
        return [outputs[:num_counted].detach(), found[0][:num_counted], *found[1:]]

    expected = run(rows[:num_counted].clone(), slope[:num_counted])
    filled = slope.clone()
    filled[num_counted:] = torch.nan
    for before, after in zip(expected, run(rows.clone(), filled), strict=True):
        torch.testing.assert_close(after, before)

"""Factors of tensors that were computed in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor
from wrong_tensors import draw

from moeverify.explain.fitting.noisy_fit import fit_noisy

UNIT = 2.0**-8


def narrow(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(torch.float64)


def sum_narrow(expected: Tensor, num_terms: int, seed: int) -> Tensor:
    """Return the expected sum, computed from terms that were each rounded to bfloat16."""
    parts = [draw(*expected.shape, seed=seed + number) for number in range(num_terms - 1)]
    last = expected - torch.stack(parts).sum(dim=0)
    return torch.stack([narrow(part) for part in (*parts, last)]).sum(dim=0)


# The noise of both sides is that of sums of four rounded terms.
EXPECTED = draw(24, 32)
GOLDEN, OTHER = sum_narrow(EXPECTED, 4, 10), sum_narrow(EXPECTED, 4, 20)


def test_sums_of_rounded_terms_have_the_factor_one() -> None:
    factor = fit_noisy(OTHER, GOLDEN, UNIT)
    assert factor is not None
    assert factor.agrees(1.0)
    assert not factor.agrees(1.1)

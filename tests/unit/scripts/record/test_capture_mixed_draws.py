"""Random operators that draw the rows of each part from the generators of that part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moeverify.scripts.record.mixed_draws import MixedDraws, read_states

SIZES = (2, 3)
Draw = Callable[[Tensor], Tensor]


def draw_twice(draw: Draw, x: Tensor) -> Tensor:
    return torch.cat([draw(x), draw(x).to(torch.float32)], 1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: functional.dropout(x, 0.5),
        torch.randn_like,
        lambda x: torch.rand(len(x), 20),
        lambda x: torch.randint(9, (len(x), 20)).float(),
        lambda x: torch.empty_like(x).bernoulli_(0.3),
        lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
        lambda x: torch.zeros_like(x).normal_(),
        lambda x: torch.multinomial(torch.ones(len(x), 20), 2).float(),
    ],
)
def test_each_part_draws_the_numbers_of_its_rank(draw: Draw) -> None:
    x = torch.arange(100.0).reshape(5, 20) + 1.0
    expected, states = [], []
    for seed, part in enumerate(x.split(list(SIZES))):
        torch.manual_seed(seed)
        states.append(read_states())
        expected.append(draw_twice(draw, part))
    torch.manual_seed(7)
    with MixedDraws(SIZES, states) as mode:
        actual = draw_twice(draw, x)
    assert torch.equal(actual, torch.cat(expected))
    assert not mode.has_others
    # The script's own generator goes on as before the pass.
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_gradients_pass_through_the_masks_of_the_parts() -> None:
    x = torch.ones(5, 20, requires_grad=True)
    with MixedDraws(SIZES, [read_states(), read_states()]):
        y = functional.dropout(x, 0.5)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_numbers_without_rows_are_mentioned() -> None:
    with MixedDraws(SIZES, [read_states(), read_states()]) as mode:
        torch.rand(1)
    assert mode.has_others

"""Weight gradients of several passes as one product, against autograd's gradients of each pass."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from moeverify.faults.setting import make_case
from moeverify.model.expert_backends.grouped_mm import swiglu_grouped
from moeverify.model.expert_weights import ExpertWeights
from moeverify.model.transformer import Transformer
from moeverify.parallel.joined_gradients import GradientOperands, join_gradients, sum_gradients

NUM_EXPERTS, NUM_ROWS, HIDDEN, WIDTH = 3, 11, 4, 8


def draw_ends(seed: int) -> Tensor:
    """Return the end row of each expert; some have no rows, and some rows belong to no expert."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, NUM_ROWS + 1, (NUM_EXPERTS,), generator=generator).sort().values.to(torch.int32)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_passes", [1, 2, 5])
def test_one_product_is_the_sum_of_each_passes_own(num_passes: int) -> None:
    passes, expected = [], torch.zeros(NUM_EXPERTS, WIDTH, HIDDEN)
    for seed in range(num_passes):
        ends = draw_ends(seed)
        rows, grads = (normal(NUM_ROWS, size, seed=seed + size) for size in (HIDDEN, WIDTH))
        start = 0
        for expert, end in enumerate(ends.tolist()):
            expected[expert] += grads[start:end].t() @ rows[start:end]
            start = end
        rows[start:], grads[start:] = torch.nan, torch.nan  # arbitrary memory contents
        passes.append(GradientOperands(rows, grads, ends))
    torch.testing.assert_close(sum_gradients(passes), expected)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_the_last_of_the_joined_micro_batches_adds_the_gradients_of_all(num_steps: int) -> None:
    spec = make_case("joined", preset="stress").recipe.model.reference
    assert spec is not None
    model = Transformer(spec, experts="grouped_mm", dtype=torch.float32)
    accumulate = join_gradients(model, 2).surround(lambda last: nullcontext())
    core = next(block.moe.experts.core for block in model.layers.values() if block.moe is not None)
    weights = [normal(NUM_EXPERTS, *shape, seed=7) for shape in ((8, 4), (8, 4), (4, 8))]
    joined, plain = ([each.clone().requires_grad_() for each in weights] for _ in range(2))
    seen = []
    for number in range(4 * num_steps):
        x = [normal(NUM_ROWS, HIDDEN, seed=number).requires_grad_() for _ in range(2)]
        ends = draw_ends(number)
        counts = ends.diff(prepend=ends.new_zeros(1)).to(torch.int64)
        with accumulate(number % 4 == 3):
            outputs = core(x[0], counts, ExpertWeights(*joined))[: ends[-1]]
        expected = swiglu_grouped(x[1], counts, ExpertWeights(*plain))[: ends[-1]]
        torch.testing.assert_close(outputs, expected)
        outputs.square().sum().backward()
        expected.square().sum().backward()
        assert x[0].grad is not None
        assert x[1].grad is not None
        torch.testing.assert_close(x[0].grad[: ends[-1]], x[1].grad[: ends[-1]])
        seen.append(joined[0].grad is None)
        if number % 2:
            for one, other in zip(joined, plain, strict=True):
                torch.testing.assert_close(one.grad, other.grad)
    assert seen[:2] == [True, False]

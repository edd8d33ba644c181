"""Gradient norms of another order than 2, told from the gradients of the run itself."""

from __future__ import annotations

import math

import pytest
import torch
from wrong_tensors import draw

from moeverify.diagnose.axes import Axes
from moeverify.diagnose.norm_groups import find_miscounted_group
from moeverify.diagnose.norm_orders import find_order
from moeverify.results.facts import ClipFacts
from moeverify.results.operation import NormOfOrder

GRADIENTS = {
    "layers.0.moe.experts.up": draw(6, 5, seed=1),
    "layers.0.norm.weight": draw(7, seed=2),
    "embed.weight": draw(9, 4, seed=3),
}
SQUARES = {name: float(each.square().sum()) for name, each in GRADIENTS.items()}
LIMIT = 0.3


def find(norm: float, *others: float) -> NormOfOrder | None:
    sizes = {
        name: (float(each.abs().sum()), float(each.abs().max()), each.numel())
        for name, each in GRADIENTS.items()
    }
    return find_order(
        norm, ClipFacts(norms=(norm, *others), squares=SQUARES, sizes=sizes), LIMIT, noise=1e-12
    )


WHOLE = torch.cat([each.flatten() for each in GRADIENTS.values()])


@pytest.mark.parametrize(
    ("norm", "order"),
    [
        (float(WHOLE.norm(p=1)), "absolute"),
        (float(WHOLE.norm(p=math.inf)), "largest"),
        (float(WHOLE.square().mean().sqrt()), "mean-square"),
        (float(WHOLE.square().sum()), "squares"),
        (LIMIT, "clipped"),
    ],
)
def test_the_order_of_a_norm_is_named(norm: float, order: str) -> None:
    assert find(norm, norm) == NormOfOrder(order=order)


def test_experts_and_all_others_have_norms_of_order_1_apart() -> None:
    apart = [GRADIENTS["layers.0.moe.experts.up"], WHOLE[30:]]
    norm = math.hypot(*(float(each.abs().sum()) for each in apart))
    assert find(norm) == NormOfOrder(order="absolute-apart")


def test_the_right_norm_one_of_no_order_and_ranks_that_differ_are_none() -> None:
    right = float(WHOLE.norm())
    assert find(right) is None
    assert find(1.3 * right) is None
    assert find(float(WHOLE.norm(p=3))) is None
    assert find(float(WHOLE.norm(p=1)), right) is None


def test_vectors_that_a_norm_leaves_out_are_one_group() -> None:
    squares = {**SQUARES, "layers.1.norm.weight": 3.0, "layers.0.attention.q_proj.bias": 2.0}
    parts = {name: {0: "0:3,0:4" if "up" in name or "embed" in name else "0:7"} for name in squares}
    excess = -sum(square for name, square in squares.items() if parts[name][0] == "0:7")
    found = find_miscounted_group(excess, squares, parts, Axes({}, []))
    assert found is not None
    assert found.part.group is not None
    assert (found.part.group.family, found.factor.value) == ("vector", 0.0)
    flat = {name: {0: "flat 0:7"} for name in squares}
    assert find_miscounted_group(excess, squares, flat, Axes({}, [])) is None

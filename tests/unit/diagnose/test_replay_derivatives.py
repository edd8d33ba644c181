"""Derivatives that are sums of two products, and statistics of blocks of positions, with one part otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replays import Heads, name_changes
from torch import Tensor
from torch.nn import functional
from wrong_tensors import draw, make_tensor

from moeverify.diagnose.replay.derivatives import OF_SUM, differentiate_otherwise, list_sums
from moeverify.diagnose.replay.language import find_variant
from moeverify.diagnose.replay.norms import NormFormula
from moeverify.diagnose.replay.tokenwise import GatedFormula, GatedGradientFormula
from moeverify.model.norm import RMSNorm
from moeverify.report.words.variant import describe_variant

GATE, UP, GIVEN = (draw(2, 8, 8, seed=seed) for seed in (1, 2, 3))
Slope = Callable[[Tensor, Tensor], Tensor]


def explain_slope(slope: Slope, *, has_gate: bool) -> list[str]:
    """Return what is said of the gradient of the gate, or of up without one, with a derivative written by hand."""
    x = GATE if has_gate else UP
    leaf = x.clone().requires_grad_()
    inside = functional.silu(leaf) * UP if has_gate else functional.gelu(leaf)
    (right,) = torch.autograd.grad(inside, leaf, GIVEN)
    share = x.sigmoid() if has_gate else torch.special.ndtr(x)
    actual = GIVEN * slope(x, share) * (UP if has_gate else 1.0)
    formula = GatedGradientFormula(
        GatedFormula(GATE if has_gate else None, UP), "gate" if has_gate else "up", GIVEN
    )
    found = find_variant(formula, make_tensor(right, actual), 1e-10)
    assert found is not None
    return [describe_variant("gradient:feed-forward-block", changes) for changes in found.variants]


def density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x.square()) / (2.0 * torch.pi) ** 0.5


@pytest.mark.parametrize(
    ("slope", "words"),
    [
        (lambda x, s: s + x * s * s, "with x*s*s in place of x*s*(1-s)"),
        (lambda x, s: s * (1 + x * (1 + s)), "with x*s*(1+s) in place of x*s*(1-s)"),
        (lambda x, s: s - x * s * (1 - s), "with -x*s*(1-s) in place of x*s*(1-s)"),
        (lambda x, s: 1 - s + x * s * (1 - s), "with (1-s) in place of s"),
        (lambda x, s: x * s + x * s * (1 - s), "with x*s in place of s"),
    ],
)
def test_a_derivative_of_silu_with_another_product_is_named(slope: Slope, words: str) -> None:
    (told,) = explain_slope(slope, has_gate=True)
    assert words in told


@pytest.mark.parametrize(
    ("slope", "words"),
    [
        (lambda x, c: c + x.square() * density(x), "with x*x*p in place of x*p"),
        (lambda x, c: 1 - c + x * density(x), "with (1-c) in place of c"),
        (lambda x, c: c + 2 * x * density(x), "with 2*x*p in place of x*p"),
    ],
)
def test_a_derivative_of_gelu_with_another_product_is_named(slope: Slope, words: str) -> None:
    (told,) = explain_slope(slope, has_gate=False)
    assert words in told


@pytest.mark.parametrize("slope", [lambda x, s: s + UP * s * (1 - s), lambda x, s: s + x * s * (0.9 - s)])
def test_another_derivative_is_no_such_sum(slope: Slope) -> None:
    assert explain_slope(slope, has_gate=True) == []


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_each_sum_is_another_one_than_the_right_derivative(activation: str) -> None:
    x = GATE.clone().requires_grad_()
    (right,) = torch.autograd.grad(getattr(functional, activation)(x).sum(), x)
    for change in list_sums(activation):
        assert OF_SUM[change.way][0] == activation
        assert not torch.allclose(differentiate_otherwise(GATE, change), right)


@pytest.mark.parametrize(
    ("share", "way"),
    [
        (lambda blocks: blocks.mean(2, keepdim=True), "over-blocks"),
        (lambda blocks: blocks.amax(2, keepdim=True), "largest-of-blocks"),
        (lambda blocks: blocks[:, :, -1:], "last-of-blocks"),
    ],
)
def test_one_statistic_for_a_block_of_positions_is_named(share: Callable[[Tensor], Tensor], way: str) -> None:
    norm = RMSNorm(8, 1e-5, {"dtype": torch.float64})
    norm.weight.data.copy_(1.0 + 0.3 * draw(8, seed=3))
    blocks = GATE.square().mean(-1, keepdim=True).unflatten(1, (-1, 4))
    squares = share(blocks).expand_as(blocks).flatten(1, 2)
    actual = GATE * torch.rsqrt(squares + norm.eps) * norm.weight.detach()
    tensor = make_tensor(norm(GATE).detach(), actual)
    found = find_variant(NormFormula(norm, GATE, {}, {}), tensor, 1e-10)
    assert name_changes(found) == [[("mean", way)]]
    assert found is not None
    assert found.variants[0][0].number == 4


@pytest.mark.parametrize(
    ("turn", "way"),
    [
        (lambda mean: mean.roll(-1, 2), "next-query"),
        (lambda mean: mean.mean(1, keepdim=True).expand_as(mean), "over-heads"),
    ],
)
def test_a_mean_of_the_gradient_of_the_softmax_that_is_taken_of_others_is_named(
    turn: Callable[[Tensor], Tensor], way: str
) -> None:
    heads = Heads()

    def pull_back(rank: int, positions: Tensor, expected: Tensor, gradient: Tensor) -> Tensor:
        del rank, expected
        return _pull_back_queries(heads, gradient, turn)[:, positions]

    assert name_changes(heads.explain_gradient("q", pull_back)) == [[("gradient-of", way)]]


def _pull_back_queries(heads: Heads, gradient: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of the queries by softmax' = p * (g - sum p g), with that sum taken otherwise."""
    group = heads.q.shape[2] // heads.k.shape[2]
    q, k = heads.turn(heads.q), heads.turn(heads.k).repeat_interleave(group, 2)
    v = heads.v.repeat_interleave(group, 2)
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("bsnd,btnd->bnst", q, k) * scale
    length = q.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    given = torch.einsum("bsnd,btnd->bnst", gradient.view(*q.shape[:3], -1), v)
    mean = turn((weights * given).sum(-1, keepdim=True))
    back = torch.einsum("bnst,btnd->bsnd", weights * (given - mean), k) * scale
    leaf = heads.q.clone().requires_grad_()
    return torch.autograd.grad(heads.turn(leaf), leaf, back)[0]

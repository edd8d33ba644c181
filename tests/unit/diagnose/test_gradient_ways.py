"""Backward passes that are written by hand with a mistake in one of their terms, and parameters that have one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replays import name_changes
from torch import Tensor, nn
from wrong_tensors import draw, make_tensor

from moeverify.diagnose.replay.language import Found, find_variant
from moeverify.diagnose.replay.norms import NormFormula
from moeverify.diagnose.replay.parameters import (
    EmbeddingGradientFormula,
    ModuleParameterFormula,
    as_module_tensor,
)
from moeverify.diagnose.replay.tokenwise import LinearFormula, TokenGradientFormula
from moeverify.model.norm import LayerNorm, RMSNorm
from moeverify.report.words.variant import describe_variant

B, S, H = 2, 8, 8
X, GIVEN = draw(B, S, H, seed=1) + 0.2, draw(B, S, H, seed=2)
Backward = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def make_norm(kind: type[RMSNorm] | type[LayerNorm] = RMSNorm) -> RMSNorm | LayerNorm:
    norm = kind(H, 1e-5, {"dtype": torch.float64})
    norm.weight.data.copy_(1.0 + 0.3 * draw(H, seed=3))
    return norm


def explain_norm(backward: Backward) -> Found | None:
    """Return what is said of an RMSNorm that passes back what `backward` makes of (x, gradient, weight, 1 / root)."""
    norm = make_norm()
    inverse = (X.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    right = _pass_back(X, GIVEN, norm.weight.detach(), inverse)
    actual = backward(X, GIVEN, norm.weight.detach(), inverse)
    assert not torch.allclose(right, actual)
    formula = TokenGradientFormula(NormFormula(norm, X, {}, {}), GIVEN)
    return find_variant(formula, make_tensor(right, actual), 1e-10)


def _pass_back(x: Tensor, given: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    g = given * weight
    return inverse * (g - x * inverse.square() * (g * x).mean(-1, keepdim=True))


def test_the_backward_pass_that_is_written_here_is_right() -> None:
    norm, x = make_norm(), X.clone().requires_grad_()
    norm(x).backward(GIVEN)
    inverse = (X.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    assert x.grad is not None
    assert torch.allclose(x.grad, _pass_back(X, GIVEN, norm.weight.detach(), inverse))


@pytest.mark.parametrize(
    ("backward", "words"),
    [
        (
            lambda x, g, w, r: r * (g * w - x * r.square() * (g * w * x).sum(-1, keepdim=True)),
            "with the gradient that comes through the squares summed over its width",
        ),
        (
            lambda x, g, w, r: r * (g * w + x * r.square() * (g * w * x).mean(-1, keepdim=True)),
            "with the gradient that comes through the squares subtracted",
        ),
        (
            lambda x, g, w, r: r * (g * w - x * r.square() * (g * w * x).mean(-1, keepdim=True).roll(-1, 1)),
            "that of the next position in the place of each",
        ),
        (
            lambda x, g, w, r: r * (g * w - x * r.square() * (g * w * x).mean((0, 1, 2), keepdim=True)),
            "averaged over tokens",
        ),
        (
            lambda x, g, w, r: r * (g * w - x * r.square() * (g * w.square() * x).mean(-1, keepdim=True)),
            "multiplied by the weight once more",
        ),
    ],
)
def test_a_term_of_the_backward_pass_of_a_norm_that_is_otherwise_is_named(
    backward: Backward, words: str
) -> None:
    found = explain_norm(backward)
    assert found is not None
    assert found.variants
    told = [describe_variant("gradient:norm", changes) for changes in found.variants]
    assert any(words in text for text in told), told


def test_noise_in_what_a_norm_passes_back_is_no_mistake() -> None:
    found = explain_norm(lambda x, g, w, r: _pass_back(x, g, w, r) + 0.1 * draw(B, S, H, seed=9))
    assert name_changes(found) == []


def test_a_deviation_of_a_layer_norm_is_said_once() -> None:
    # Less its mean, the squares are the variance: what is equal for any input is one candidate, the simplest.
    norm = make_norm(LayerNorm)
    centred = X - X.mean(-1, keepdim=True)
    right = norm(X).detach()
    root = (centred.square().sum(-1, keepdim=True) / (H - 1) + norm.eps).sqrt()
    actual = centred / root * norm.weight.detach() + norm.bias.detach()
    found = find_variant(NormFormula(norm, X, {}, {}), make_tensor(right, actual), 1e-10)
    assert name_changes(found) == [[("mean", "unbiased")]]


@pytest.mark.parametrize("name", ["largest", "length", "deviation"])
def test_an_eps_that_depends_on_the_row_names_what_it_is_scaled_by(name: str) -> None:
    norm = make_norm()
    sizes = {
        "largest": X.abs().amax(-1, keepdim=True),
        "length": X.norm(dim=-1, keepdim=True),
        "deviation": X.std(-1, correction=0, keepdim=True),
    }
    norm.eps = 1e-3
    root = (X.square().mean(-1, keepdim=True) + 1e-3 * sizes[name].square()).sqrt()
    tensor = make_tensor(norm(X).detach(), X / root * norm.weight.detach())
    found = find_variant(NormFormula(norm, X, {}, {}), tensor, 1e-10)
    assert found is not None
    assert [[(each.way, each.name) for each in changes] for changes in found.variants] == [[("of", name)]]


def explain_weight(change: Callable[[Tensor, Tensor], Tensor]) -> Found | None:
    """Return what is said of the gradient (F, H) that a linear layer gives its weight from (input, gradient)."""
    layer = nn.Linear(H, 6, bias=False).double()
    given = draw(B, S, 6, seed=4)
    right = torch.einsum("bsf,bsh->fh", given, X)
    tensor = make_tensor(right, change(X, given))
    formula = ModuleParameterFormula(LinearFormula(layer, X, {}, {}), "weight", given)
    return find_variant(formula, as_module_tensor(tensor), 1e-10)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda x, g: torch.einsum("bsf,bsh->fh", g[1:], x[1:]),
            {("tokens", "without-row"), ("tokens", "only-row")},
        ),
        (lambda x, g: torch.einsum("bsf,bsh->fh", g[:, 1:], x[:, 1:]), {("tokens", "without-position")}),
        (lambda x, g: torch.einsum("bsf,bsh->fh", g, x.roll(-1, 1)), {("input", "of-position")}),
    ],
)
def test_a_gradient_of_a_weight_from_other_tokens_is_named(
    change: Callable[[Tensor, Tensor], Tensor], expected: set[tuple[str, str]]
) -> None:
    found = name_changes(explain_weight(change))
    assert found
    assert {pair for changes in found for pair in changes} <= expected


def test_other_gradients_of_a_weight_have_no_such_cause() -> None:
    found = explain_weight(lambda x, g: torch.einsum("bsf,bsh->fh", g, x) + 0.1 * draw(6, H, seed=7))
    assert name_changes(found) == []


@pytest.mark.parametrize("way", ["last-alone", "mean"])
def test_an_embedding_whose_row_takes_a_part_of_its_tokens(way: str) -> None:
    tokens = torch.tensor([[0, 3, 1, 3, 5, 5, 5, 2], [2, 0, 4, 4, 1, 3, 0, 5]])
    right = torch.zeros(6, H, dtype=torch.float64).index_add(0, tokens.flatten(), GIVEN.flatten(0, 1))
    counts = torch.bincount(tokens.flatten(), minlength=6).double()
    last = torch.zeros_like(right)
    for at, gradient in zip(tokens.flatten(), GIVEN.flatten(0, 1), strict=True):
        last[at] = gradient
    actual = last if way == "last-alone" else right / counts.unsqueeze(1)
    formula = EmbeddingGradientFormula(nn.Embedding(6, H), tokens, GIVEN)
    found = find_variant(formula, as_module_tensor(make_tensor(right, actual)), 1e-10)
    assert name_changes(found) == [[("occurrences", way)]]

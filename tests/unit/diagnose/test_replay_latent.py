"""Replays of what latent attention passes back to its projections."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from replays import LENGTH, ROWS, ZIGZAG, make_model, name_changes
from torch import Tensor

from moeverify.diagnose.replay.attention import AttentionFormula
from moeverify.diagnose.replay.chunks import Chunks
from moeverify.diagnose.replay.language import Found, find_variant
from moeverify.diagnose.replay.latent_gradient import LatentGradientFormula, Projection
from moeverify.diagnose.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.model.mla import LatentAttention

MODULES: dict[Projection, str] = {"queries": "q_b_proj", "heads": "kv_b_proj", "latent": "kv_a_proj"}


@cache
def make_attention() -> tuple[LatentAttention, Tensor, Tensor]:
    """Return the module, what goes into it, and the gradient of its heads' outputs."""
    module = make_model("tiny-deepseek-v3").layers["0"].attention
    assert isinstance(module, LatentAttention)
    generator = torch.Generator().manual_seed(4)
    hidden, heads = module.o_proj.out_features, module.o_proj.in_features
    x = torch.randn(ROWS, LENGTH, hidden, dtype=torch.float64, generator=generator)
    return module, x, torch.randn(ROWS, LENGTH, heads, dtype=torch.float64, generator=generator)


def pull_back(of: Projection, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what a projection puts out, and the gradient that comes back to it, by the module itself.

    `counts` says how often each query counts (S).
    """
    module, x, gradient = make_attention()
    gradient = gradient if counts is None else gradient * counts[:, None]
    seen: list[Tensor] = []
    inside: list[Tensor] = []
    handles = [
        getattr(module, MODULES[of]).register_forward_hook(lambda *given: seen.append(given[2])),
        module.o_proj.register_forward_pre_hook(lambda _, given: inside.append(given[0])),
    ]
    try:
        module(x, torch.arange(LENGTH).expand(ROWS, LENGTH))
        (found,) = torch.autograd.grad(inside[0], seen[0], gradient)
    finally:
        for handle in handles:
            handle.remove()
    return seen[0].detach(), found


def explain(of: Projection, actual: Callable[[Tensor], Tensor]) -> Found | None:
    module, x, gradient = make_attention()
    given, expected = pull_back(of)
    forward = AttentionFormula(module, x, None, Chunks([range(LENGTH)]))
    formula = LatentGradientFormula(module, forward, of, given, gradient)
    shard = RankShard(0, Region.whole(expected.shape), actual(expected))
    return find_variant(formula, WrongTensor((0, MODULE_KINDS["backward"], of), expected, (shard,)), 1e-9)


def test_the_gradient_of_the_shared_part_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, _ = make_attention()
    monkeypatch.setattr(module, "share", lambda x: x.detach())
    _, lost = pull_back("latent")
    monkeypatch.undo()
    assert name_changes(explain("latent", lambda _: lost)) == [[("shared", "none")]]


@pytest.mark.parametrize("of", MODULES)
def test_a_mask_that_the_backward_pass_lacks(of: Projection, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, _ = make_attention()
    core = module.core
    monkeypatch.setattr(module, "core", lambda q, k, v, positions: core(q, k, v, positions * 0))
    _, unmasked = pull_back(of)
    monkeypatch.undo()
    assert [("mask", "none")] in (name_changes(explain(of, lambda _: unmasked)) or [])


@pytest.mark.parametrize(
    ("of", "way", "own", "others"),
    [("heads", "own-twice", 2.0, 1.0), ("latent", "not-own", 0.0, 1.0), ("latent", "own", 1.0, 0.0)],
)
def test_queries_may_be_missing_in_what_comes_back(
    of: Projection, way: str, own: float, others: float
) -> None:
    module, x, gradient = make_attention()
    given, expected = pull_back(of)
    shards = []
    for rank, positions in enumerate(ZIGZAG):
        counts = torch.full((LENGTH,), others, dtype=torch.float64)
        counts[list(positions)] = own
        _, lost = pull_back(of, counts)
        rows, _, width = expected.shape
        region = Region.box(expected.shape, [range(rows), positions, range(width)])
        shards.append(RankShard(rank, region, lost[:, list(positions)]))
    formula = LatentGradientFormula(
        module, AttentionFormula(module, x, None, Chunks(ZIGZAG)), of, given, gradient
    )
    tensor = WrongTensor((0, MODULE_KINDS["backward"], of), expected, tuple(shards))
    assert name_changes(find_variant(formula, tensor, 1e-9)) == [[("queries", way)]]


@pytest.mark.parametrize("of", MODULES)
def test_noise_is_no_variant(of: Projection) -> None:
    found = explain(of, lambda right: right + 0.1 * right.abs().roll(1, -1))
    assert name_changes(found) == []

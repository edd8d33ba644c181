"""A clip of each element in the place of one of the norm, under optimizers that decay in different places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.checks.base import Outcome
from moeverify.diagnose.recomputed import join_alike
from moeverify.results.finding import Finding
from moeverify.train.clipping import clip_coefficient
from moeverify.train.engine import PlainEngine

OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "clip_norm": 0.02},
    "adam": {"name": "adam", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.02},
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.02},
}


def clip_elements(self: PlainEngine, shards: Any, norm: Tensor, most: float) -> Tensor:
    with torch.no_grad():
        for shard in shards:
            if shard.tensor.grad is not None:
                shard.tensor.grad.clamp_(-most, most)
    return clip_coefficient(norm, most)


def clip_nothing(self: PlainEngine, shards: Any, norm: Tensor, most: float) -> Tensor:
    return clip_coefficient(norm, most)


def list_heads(outcome: Outcome) -> list[Finding]:
    return [each for each in join_alike(outcome.findings) if not each.follows]


@pytest.mark.parametrize("precision", ["float64", "mixed", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_clip_of_each_element_is_one_cause_for_all_parameters(
    judge_steps: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    """Also for those in which no element is beyond the limit: by their own they are not clipped."""
    monkeypatch.setattr(PlainEngine, "clip", clip_elements)
    outcome = judge_steps(OPTIMIZERS[name], precision)
    assert any(each.facts.is_unclipped for each in outcome.findings)
    assert {each.facts.variant for each in list_heads(outcome)} == {("clipped-by-value",)}


@pytest.mark.parametrize("precision", ["float64", "mixed", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_that_are_not_clipped_are_not_clipped_by_value(
    judge_steps: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    monkeypatch.setattr(PlainEngine, "clip", clip_nothing)
    heads = list_heads(judge_steps(OPTIMIZERS[name], precision))
    assert heads
    # The square of a sum of gradient and decay is no sum of terms, but a formula.
    assert all(each.facts.is_unclipped or each.facts.variant == ("not-clipped",) for each in heads)

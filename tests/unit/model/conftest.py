from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.cases.schema import MoE, ReferenceModel
from moeverify.model.init import initialize
from moeverify.model.transformer import Transformer


@pytest.fixture
def make_moe() -> Callable[..., MoE]:
    """Return a function that makes MoE specs with every option on; fields can be changed."""

    def make(**changes: Any) -> MoE:
        fields: dict[str, Any] = {
            "num_experts": 12,
            "top_k": 3,
            "expert_hidden": 8,
            "score": "sigmoid",
            "route_scale": 2.5,
            "num_groups": 4,
            "top_groups": 2,
            "group_score": "top2_sum",
            "router_bias": True,
            "expert_bias": True,
            "shared_hidden": 16,
            "shared_gate": True,
            "selection_bias_rate": 1e-3,
            "idle_experts": 1,
        }
        return MoE(**{**fields, **changes})

    return make


@pytest.fixture
def make_spec(make_moe: Callable[..., MoE]) -> Callable[..., ReferenceModel]:
    """Return a function that makes model specs with one dense and two MoE layers and every option on."""

    def make(**changes: Any) -> ReferenceModel:
        fields: dict[str, Any] = {
            "vocab_size": 40,
            "hidden": 16,
            "num_layers": 3,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "ffn_hidden": 24,
            "num_dense_layers": 1,
            "attention_bias": True,
            "qk_norm": True,
            "mlp_bias": True,
        }
        return ReferenceModel(**{**fields, "moe": make_moe(), **changes})

    return make


@pytest.fixture
def make_model() -> Callable[..., Transformer]:
    """Return a function that makes initialized models."""

    def make(spec: ReferenceModel, seed: int = 0, **options: Any) -> Transformer:
        model = Transformer(spec, **options)
        initialize(model, spec, seed)
        return model

    return make


@pytest.fixture
def make_normal() -> Callable[..., Tensor]:
    """Return a function that draws normal numbers in float64, reproducible by seed."""

    def make(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    return make

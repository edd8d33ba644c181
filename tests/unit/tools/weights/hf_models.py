"""Tiny random models of transformers, one per family, and a patch that makes them compute in float64."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LATENT: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
}

_GROUPED = {
    **SIZES,
    "head_dim": 16,
    "n_routed_experts": 8,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 5, "head_dim": 12}),
    "qwen2_moe": (
        "qwen2_moe",
        {**SIZES, "num_experts": 6, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**SIZES, "num_experts": 6, "moe_intermediate_size": 20, "head_dim": 12, "norm_topk_prob": True},
    ),
    "olmoe": ("olmoe", {**SIZES, "num_experts": 6}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "deepseek_v3-biased": ("deepseek_v3", {**_LATENT, "attention_bias": True, "norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", {**_GROUPED, "attention_bias": True}),
    "glm4_moe-normed": (
        "glm4_moe",
        {
            **_GROUPED,
            "use_qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        },
    ),
    "minimax_m2": ("minimax_m2", {**SIZES, "num_local_experts": 6, "head_dim": 16, "rotary_dim": 8}),
    "qwen3_moe-tied": (
        "qwen3_moe",
        {
            **SIZES,
            "num_experts": 6,
            "moe_intermediate_size": 20,
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a model of a family in float64, every parameter and selection bias random."""
    transformers = pytest.importorskip("transformers")
    model_type, fields = FAMILIES[name]
    config = transformers.AutoConfig.for_model(model_type, **{**fields, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    ).double()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key:
                tensor.copy_(1.0 + 0.1 * torch.randn(tensor.shape))
            elif key.endswith("bias"):  # selection biases move the choice, so they stay small
                tensor.copy_(0.1 * torch.randn(tensor.shape))
    return model.eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a model as transformers does, and return the folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    return folder


@contextlib.contextmanager
def widened(model: Any) -> Iterator[None]:
    """Replace float32 by float64 in a model's code: norms, softmax, RoPE, the loss."""

    class Wide(ModuleType):
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    families = [type(module).__module__ for module in model.modules()]
    asked = {
        *(name for name in families if name.startswith("transformers.")),
        "transformers.modeling_rope_utils",
        "transformers.loss.loss_utils",
    }
    with contextlib.ExitStack() as stack:
        for name in sorted(asked):
            module = sys.modules[name]
            if getattr(module, "torch", None) is torch:
                stack.enter_context(mock.patch.object(module, "torch", Wide("torch")))
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        yield


def widen_rotary(model: Any) -> None:
    """Recompute the rotary frequencies in float64: they were computed when the model was made."""
    with widened(model):
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                make = sys.modules[type(module).__module__].ROPE_INIT_FUNCTIONS.get(
                    module.rope_type, module.compute_default_rope_parameters
                )
                frequencies, module.attention_scaling = make(module.config)
                module.inv_freq = module.original_inv_freq = frequencies

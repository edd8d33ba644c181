"""Presets of common model families at their published sizes, and a tiny model of the same structure for each.

A preset is a mapping of fields of `ReferenceModel`. If every layer has experts, `ffn_hidden` is the width
that a dense layer of that family would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]

_MIXTRAL_8X7B: Fields = {
    "vocab_size": 32000,
    "hidden": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "ffn_hidden": 14336,
    "rope_theta": 1e6,
    "moe": {"num_experts": 8, "top_k": 2, "expert_hidden": 14336, "balance_coef": 0.02},
}

_QWEN2_57B: Fields = {
    "vocab_size": 151936,
    "hidden": 3584,
    "num_layers": 28,
    "num_heads": 28,
    "num_kv_heads": 4,
    "head_dim": 128,
    "ffn_hidden": 18944,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": True,
    "attention_bias_scope": "qkv",
    "moe": {
        "num_experts": 64,
        "top_k": 8,
        "expert_hidden": 2560,
        "renormalize": False,
        "shared_hidden": 20480,
        "shared_gate": True,
        "balance_coef": 0.001,
    },
}

_QWEN3_30B: Fields = {
    "vocab_size": 151936,
    "hidden": 2048,
    "num_layers": 48,
    "num_heads": 32,
    "num_kv_heads": 4,
    "head_dim": 128,
    "ffn_hidden": 6144,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "qk_norm": True,
    "moe": {"num_experts": 128, "top_k": 8, "expert_hidden": 768, "balance_coef": 0.001},
}

_OLMOE_1B: Fields = {
    "vocab_size": 50304,
    "hidden": 2048,
    "num_layers": 16,
    "num_heads": 16,
    "num_kv_heads": 16,
    "head_dim": 128,
    "ffn_hidden": 1024,
    "qk_norm": True,
    "qk_norm_scope": "all",
    "moe": {
        "num_experts": 64,
        "top_k": 8,
        "expert_hidden": 1024,
        "renormalize": False,
        "balance_coef": 0.01,
        "z_coef": 0.001,
    },
}

_YARN: Fields = {"factor": 40.0, "original_length": 4096}

_DEEPSEEK_V2: Fields = {
    "vocab_size": 102400,
    "hidden": 5120,
    "num_layers": 60,
    "num_heads": 128,
    "num_kv_heads": 128,
    "head_dim": 192,
    "ffn_hidden": 12288,
    "num_dense_layers": 1,
    "norm_eps": 1e-6,
    "mla": {"q_lora": 1536, "kv_lora": 512, "qk_nope": 128, "qk_rope": 64, "v_head": 128},
    "yarn": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "moe": {
        "num_experts": 160,
        "top_k": 6,
        "expert_hidden": 1536,
        "renormalize": False,
        "route_scale": 16.0,
        "num_groups": 8,
        "top_groups": 3,
        "shared_hidden": 3072,
        "balance_coef": 0.001,
    },
}

_DEEPSEEK_V3: Fields = {
    "vocab_size": 129280,
    "hidden": 7168,
    "num_layers": 61,
    "num_heads": 128,
    "num_kv_heads": 128,
    "head_dim": 192,
    "ffn_hidden": 18432,
    "num_dense_layers": 3,
    "norm_eps": 1e-6,
    "mla": _DEEPSEEK_V2["mla"],
    "yarn": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "moe": {
        "num_experts": 256,
        "top_k": 8,
        "expert_hidden": 2048,
        "score": "sigmoid",
        "route_scale": 2.5,
        "num_groups": 8,
        "top_groups": 4,
        "group_score": "top2_sum",
        "shared_hidden": 2048,
        "balance_coef": 1e-4,
        "selection_bias_rate": 1e-3,
    },
}

_GLM_45_AIR: Fields = {
    "vocab_size": 151552,
    "hidden": 4096,
    "num_layers": 46,
    "num_heads": 96,
    "num_kv_heads": 8,
    "head_dim": 128,
    "ffn_hidden": 10944,
    "num_dense_layers": 1,
    "rope_theta": 1e6,
    "rotary_dim": 64,
    "attention_bias": True,
    "attention_bias_scope": "qkv",
    "moe": {
        "num_experts": 128,
        "top_k": 8,
        "expert_hidden": 1408,
        "score": "sigmoid",
        "shared_hidden": 1408,
        "selection_bias_rate": 1e-3,
    },
}

_MINIMAX_M2: Fields = {
    "vocab_size": 200064,
    "hidden": 3072,
    "num_layers": 62,
    "num_heads": 48,
    "num_kv_heads": 8,
    "head_dim": 128,
    "ffn_hidden": 1536,
    "norm_eps": 1e-6,
    "rope_theta": 5e6,
    "rotary_dim": 64,
    "qk_norm": True,
    "qk_norm_scope": "all",
    "moe": {
        "num_experts": 256,
        "top_k": 8,
        "expert_hidden": 1536,
        "score": "sigmoid",
        "selection_bias_rate": 1e-3,
    },
}

_GPT: Fields = {
    "vocab_size": 50257,
    "hidden": 1024,
    "num_layers": 4,
    "num_heads": 16,
    "num_kv_heads": 16,
    "head_dim": 64,
    "ffn_hidden": 4096,
    "norm": "layer",
    "activation": "gelu",
    "mlp_bias": True,
}


def _change(base: Fields, *, moe: Fields | None = None, **fields: Any) -> Fields:
    """Return `base` with some fields changed. `moe` changes the fields of its MoE section."""
    experts = {"moe": {**base["moe"], **(moe or {})}} if "moe" in base else {}
    return {**base, **experts, **fields}


_TRUE: Mapping[str, Fields] = {
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "mixtral-8x22b": _change(
        _MIXTRAL_8X7B,
        hidden=6144,
        num_layers=56,
        num_heads=48,
        ffn_hidden=16384,
        moe={"expert_hidden": 16384, "balance_coef": 0.001},
    ),
    "mixtral-8x2b": _change(
        _MIXTRAL_8X7B,
        hidden=2048,
        num_layers=24,
        num_heads=16,
        ffn_hidden=5440,
        moe={"expert_hidden": 5440, "balance_coef": 0.001},
    ),
    "qwen2-57b-a14b": _QWEN2_57B,
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen3-235b-a22b": _change(
        _QWEN3_30B, hidden=4096, num_layers=94, num_heads=64, ffn_hidden=12288, moe={"expert_hidden": 1536}
    ),
    "olmoe-1b-7b": _OLMOE_1B,
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v2-lite": _change(
        _DEEPSEEK_V2,
        hidden=2048,
        num_layers=27,
        num_heads=16,
        num_kv_heads=16,
        ffn_hidden=10944,
        mla={**_DEEPSEEK_V2["mla"], "q_lora": 0},
        moe={
            "num_experts": 64,
            "expert_hidden": 1408,
            "route_scale": 1.0,
            "num_groups": 1,
            "top_groups": 1,
            "shared_hidden": 2816,
        },
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "glm-4.5-air": _GLM_45_AIR,
    "minimax-m2": _MINIMAX_M2,
    "gpt": _GPT,
}

# The tiny models keep the routing and every switch of their family, the ratio of heads to kv heads, and the
# ratio of the head width to hidden / heads. Widths are multiples of 2 and 4, so that small layouts divide
# them. The weights are large enough for the router to prefer some experts. A YaRN context starts at few
# tokens, so that small batches have positions in each part of it.
_SMALL: Fields = {"vocab_size": 128, "num_layers": 2, "init_std": 0.1}
_SMALL_LATENT: Fields = {
    **_SMALL,
    "num_layers": 3,
    "num_dense_layers": 1,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 24,
    "ffn_hidden": 64,
}
_SMALL_MLA: Fields = {"q_lora": 24, "kv_lora": 16, "qk_nope": 16, "qk_rope": 8, "v_head": 12}
_SMALL_LENGTH: Fields = {"original_length": 8}

_TINY: Mapping[str, Fields] = {
    "tiny-mixtral-8x7b": _change(
        _TRUE["mixtral-8x7b"],
        **{**_SMALL, "hidden": 32, "num_heads": 8, "num_kv_heads": 2, "head_dim": 4, "ffn_hidden": 64},
        moe={"expert_hidden": 64},
    ),
    "tiny-mixtral-8x22b": _change(
        _TRUE["mixtral-8x22b"],
        **{**_SMALL, "hidden": 48, "num_heads": 12, "num_kv_heads": 2, "head_dim": 4, "ffn_hidden": 64},
        moe={"expert_hidden": 64},
    ),
    "tiny-mixtral-8x2b": _change(
        _TRUE["mixtral-8x2b"],
        **{**_SMALL, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_hidden": 64},
        moe={"expert_hidden": 64},
    ),
    "tiny-qwen2-57b-a14b": _change(
        _TRUE["qwen2-57b-a14b"],
        **{**_SMALL, "hidden": 56, "num_heads": 14, "num_kv_heads": 2, "head_dim": 4, "ffn_hidden": 64},
        moe={"num_experts": 16, "top_k": 2, "expert_hidden": 32, "shared_hidden": 64},
    ),
    "tiny-qwen3-30b-a3b": _change(
        _TRUE["qwen3-30b-a3b"],
        **{**_SMALL, "hidden": 64, "num_heads": 16, "num_kv_heads": 2, "head_dim": 8, "ffn_hidden": 64},
        moe={"num_experts": 16, "top_k": 2, "expert_hidden": 32},
    ),
    "tiny-qwen3-235b-a22b": _change(
        _TRUE["qwen3-235b-a22b"],
        **{**_SMALL, "hidden": 64, "num_heads": 32, "num_kv_heads": 2, "head_dim": 4, "ffn_hidden": 64},
        moe={"num_experts": 16, "top_k": 2, "expert_hidden": 32},
    ),
    "tiny-olmoe-1b-7b": _change(
        _TRUE["olmoe-1b-7b"],
        **{**_SMALL, "hidden": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "ffn_hidden": 64},
        moe={"num_experts": 16, "top_k": 2, "expert_hidden": 32},
    ),
    "tiny-deepseek-v2": _change(
        _TRUE["deepseek-v2"],
        **{**_SMALL_LATENT, "hidden": 40, "mla": _SMALL_MLA},
        yarn={**_TRUE["deepseek-v2"]["yarn"], **_SMALL_LENGTH},
        moe={"num_experts": 16, "top_k": 3, "expert_hidden": 16, "shared_hidden": 32},
    ),
    "tiny-deepseek-v2-lite": _change(
        _TRUE["deepseek-v2-lite"],
        **{**_SMALL_LATENT, "hidden": 64, "num_heads": 4, "num_kv_heads": 4},
        mla={**_SMALL_MLA, "q_lora": 0},
        yarn={**_TRUE["deepseek-v2-lite"]["yarn"], **_SMALL_LENGTH},
        moe={"num_experts": 16, "top_k": 3, "expert_hidden": 16, "shared_hidden": 32},
    ),
    "tiny-deepseek-v3": _change(
        _TRUE["deepseek-v3"],
        **{**_SMALL_LATENT, "hidden": 56, "mla": _SMALL_MLA},
        yarn={**_TRUE["deepseek-v3"]["yarn"], **_SMALL_LENGTH},
        moe={"num_experts": 16, "top_k": 4, "expert_hidden": 16, "shared_hidden": 16},
    ),
    "tiny-glm-4.5-air": _change(
        _TRUE["glm-4.5-air"],
        **{**_SMALL, "hidden": 32, "num_heads": 24, "num_kv_heads": 2, "head_dim": 4, "ffn_hidden": 64},
        rotary_dim=2,
        moe={"num_experts": 16, "top_k": 3, "expert_hidden": 16, "shared_hidden": 16},
    ),
    "tiny-minimax-m2": _change(
        _TRUE["minimax-m2"],
        **{**_SMALL, "hidden": 48, "num_heads": 12, "num_kv_heads": 2, "head_dim": 8, "ffn_hidden": 32},
        rotary_dim=4,
        moe={"num_experts": 16, "top_k": 3, "expert_hidden": 32},
    ),
    "tiny-gpt": {
        **_GPT,
        **_SMALL,
        "num_layers": 3,
        "hidden": 32,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
        "ffn_hidden": 128,
    },
    # The routing of DeepSeek-V3 and its first dense layer, with ordinary attention instead of MLA.
    "tiny-deepseek-v3-routing": {
        **_SMALL,
        "num_layers": 3,
        "hidden": 32,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
        "ffn_hidden": 96,
        "num_dense_layers": 1,
        "norm_eps": 1e-6,
        "moe": {
            "num_experts": 16,
            "top_k": 4,
            "expert_hidden": 16,
            "score": "sigmoid",
            "route_scale": 2.5,
            "num_groups": 4,
            "top_groups": 2,
            "group_score": "top2_sum",
            "shared_hidden": 16,
            "balance_coef": 1e-4,
            "selection_bias_rate": 1e-3,
        },
    },
}

_STRESS: Mapping[str, Fields] = {
    # Every switch that can hide a bug is on: groups, a gated shared expert, all biases, both auxiliary
    # losses, a selection bias that changes, and an expert without tokens.
    "stress": {
        "vocab_size": 96,
        "hidden": 32,
        "num_layers": 3,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 8,
        "ffn_hidden": 64,
        "num_dense_layers": 1,
        "attention_bias": True,
        "qk_norm": True,
        "mlp_bias": True,
        "init_std": 0.1,
        "moe": {
            "num_experts": 16,
            "top_k": 3,
            "expert_hidden": 32,
            "score": "sigmoid",
            "route_scale": 1.5,
            "num_groups": 4,
            "top_groups": 2,
            "group_score": "top2_sum",
            "router_bias": True,
            "expert_bias": True,
            "shared_hidden": 32,
            "shared_gate": True,
            "balance_coef": 0.02,
            "z_coef": 1e-3,
            "selection_bias_rate": 1e-2,
            "idle_experts": 1,
        },
    },
    # Options that exclude those of `stress`: tied embedding, k = 1, softmax, LayerNorm, gelu, as many kv
    # heads as heads. Combine weights are not renormalized: a single renormalized weight is 1 and has no
    # gradient.
    "stress-tied": {
        "vocab_size": 96,
        "hidden": 32,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 4,
        "ffn_hidden": 64,
        "norm": "layer",
        "activation": "gelu",
        "mlp_bias": True,
        "tie_embedding": True,
        "init_std": 0.1,
        "moe": {
            "num_experts": 12,
            "top_k": 1,
            "expert_hidden": 32,
            "renormalize": False,
            "expert_bias": True,
            "balance_coef": 0.02,
            "z_coef": 1e-3,
            "idle_experts": 2,
        },
    },
}

PRESETS: Mapping[str, Fields] = {**_TRUE, **_TINY, **_STRESS}

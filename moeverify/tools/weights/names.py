"""Hugging Face's name for each tensor of the reference model: one table per family, from shared parts.

`{layer}` and `{expert}` are numbers. If the Hugging Face name contains `{expert}`, our tensor is a stack
whose first dim is the expert. Sources: the published checkpoints, whose names transformers reads and writes
(conversion_mapping.py of 5.23).
"""

from __future__ import annotations

from collections.abc import Mapping

Names = Mapping[str, str]

_BLOCK = "layers.{layer}."
_THEIRS = "model.layers.{layer}."


def _in_blocks(names: Names) -> dict[str, str]:
    """Return FQNs for names of tensors relative to a block."""
    return {_BLOCK + ours: _THEIRS + theirs for ours, theirs in names.items()}


_SHELL: Names = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    **_in_blocks(
        {
            "attention_norm.weight": "input_layernorm.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "attention.o_proj.weight": "self_attn.o_proj.weight",
        }
    ),
}

_HEADS: Names = _in_blocks(
    {f"attention.{part}_proj.weight": f"self_attn.{part}_proj.weight" for part in ("q", "k", "v")}
)
_HEAD_BIASES: Names = _in_blocks(
    {f"attention.{part}_proj.bias": f"self_attn.{part}_proj.bias" for part in ("q", "k", "v")}
)
_OUTPUT_BIAS: Names = _in_blocks({"attention.o_proj.bias": "self_attn.o_proj.bias"})
_HEAD_NORMS: Names = _in_blocks(
    {f"attention.{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in ("q", "k")}
)

_LATENT_HEADS: Names = _in_blocks(
    {
        "attention.q_proj.weight": "self_attn.q_proj.weight",
        "attention.q_a_proj.weight": "self_attn.q_a_proj.weight",
        "attention.q_a_proj.bias": "self_attn.q_a_proj.bias",
        "attention.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
        "attention.q_b_proj.weight": "self_attn.q_b_proj.weight",
        "attention.kv_a_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "attention.kv_a_proj.bias": "self_attn.kv_a_proj_with_mqa.bias",
        "attention.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attention.kv_b_proj.weight": "self_attn.kv_b_proj.weight",
    }
)


def _rename_mlp(ours: str, theirs: str) -> dict[str, str]:
    """Return the names of a dense MLP."""
    return _in_blocks(
        {f"{ours}.{part}_proj.weight": f"{theirs}.{part}_proj.weight" for part in ("gate", "up", "down")}
    )


_EXPERTS: Names = _in_blocks(
    {
        "moe.router.weight": "mlp.gate.weight",
        **{
            f"moe.experts.{part}": f"mlp.experts.{{expert}}.{part}_proj.weight"
            for part in ("gate", "up", "down")
        },
    }
)

MIXTRAL: Names = {
    **_SHELL,
    **_HEADS,
    **_in_blocks(
        {
            "moe.router.weight": "block_sparse_moe.gate.weight",
            "moe.experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
            "moe.experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
            "moe.experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
        }
    ),
}

QWEN2_MOE: Names = {
    **_SHELL,
    **_HEADS,
    **_HEAD_BIASES,
    **_EXPERTS,
    **_rename_mlp("moe.shared", "mlp.shared_expert"),
    **_in_blocks({"moe.shared_gate.weight": "mlp.shared_expert_gate.weight"}),
}

QWEN3_MOE: Names = {**_SHELL, **_HEADS, **_HEAD_BIASES, **_OUTPUT_BIAS, **_HEAD_NORMS, **_EXPERTS}

OLMOE: Names = QWEN3_MOE

_SELECTION_BIAS = _in_blocks({"moe.router.selection_bias": "mlp.gate.e_score_correction_bias"})

GLM4_MOE: Names = {
    **_SHELL,
    **_HEADS,
    **_HEAD_BIASES,
    **_HEAD_NORMS,
    **_EXPERTS,
    **_rename_mlp("mlp", "mlp"),
    **_rename_mlp("moe.shared", "mlp.shared_experts"),
    **_SELECTION_BIAS,
}

MINIMAX_M2: Names = {
    **MIXTRAL,
    **_HEAD_NORMS,
    **_in_blocks({"moe.router.selection_bias": "block_sparse_moe.e_score_correction_bias"}),
}

DEEPSEEK_V2: Names = {
    **_SHELL,
    **_LATENT_HEADS,
    **_OUTPUT_BIAS,
    **_EXPERTS,
    **_rename_mlp("mlp", "mlp"),
    **_rename_mlp("moe.shared", "mlp.shared_experts"),
}

DEEPSEEK_V3: Names = {**DEEPSEEK_V2, **_SELECTION_BIAS}

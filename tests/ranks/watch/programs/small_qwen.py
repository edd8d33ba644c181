"""A small Qwen3-MoE of transformers, which the scripts beside this one train."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LENGTH, VOCABULARY = 32, 128


def make_model() -> Qwen3MoeForCausalLM:
    """Return the model, with the same weights on every rank."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes, **heads, **experts)
    return Qwen3MoeForCausalLM(config)

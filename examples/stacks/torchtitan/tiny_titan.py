"""Tiny flavors of torchtitan's models, registered as in a user's project: each returns a ModelSpec."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.model_spec import ModelSpec

VOCABULARY, WIDTH, LAYERS = 96, 32, 2


def make_qwen3_moe() -> ModelSpec:
    """Return a Qwen3 with 8 experts, 2 per token."""
    layers = qwen3._build_qwen3_moe_layers(
        **_size_attention(),
        head_dim=8,
        moe_hidden_dim=16,
        num_experts=8,
        top_k=2,
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=8, max_seq_len=64),
    )
    return _register("qwen3", qwen3.Qwen3Model.Config(layers=layers, **_make_ends()), qwen3.parallelize_qwen3)


def make_llama3() -> ModelSpec:
    """Return a Llama 3."""
    layers = llama3._build_llama3_layers(
        **_size_attention(), hidden_dim=64, rope=ComplexRoPE.Config(dim=8, max_seq_len=64)
    )
    config = llama3.Llama3Model.Config(layers=layers, **_make_ends())
    return _register("llama3", config, llama3.parallelize_llama)


def make_deepseek_v3() -> ModelSpec:
    """Return a DeepSeek-V3: latent attention, one dense layer, one of 8 routed experts and a shared one."""
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=LAYERS,
        n_dense_layers=1,
        dim=WIDTH,
        n_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        mscale=0.7,
        dense_hidden_dim=64,
        moe_hidden_dim=16,
        num_experts=8,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="sigmoid",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=8, max_seq_len=64),
    )
    config = deepseek_v3.DeepSeekV3Model.Config(layers=layers, mtp_layers=[], **_make_ends())
    return _register("deepseek_v3", config, deepseek_v3.parallelize_deepseekv3)


def _size_attention() -> dict[str, Any]:
    return {"n_layers": LAYERS, "dim": WIDTH, "n_heads": 4, "n_kv_heads": 2, "attn_backend": "flex"}


def _make_ends() -> dict[str, Any]:
    normal = {"weight": partial(nn.init.normal_, std=0.2)}
    return {
        "vocab_size": VOCABULARY,
        "dim": WIDTH,
        "norm": RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": nn.init.ones_}),
        "tok_embeddings": Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=normal),
        "lm_head": Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=normal),
    }


def _register(name: str, config: Any, parallelize: Any) -> ModelSpec:
    return ModelSpec(
        name=name,
        flavor="tiny",
        model=config,
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )

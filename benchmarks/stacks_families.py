"""Families of transformers as tiny models: the fields of their configurations."""

# Fields that all configurations share, and additional fields of each family.
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
FULL_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
HEAD = {"head_dim": 8}
WINDOW = {"sliding_window": 4}
DENSE = {
    "llama": {},
    "qwen3": HEAD,
    "olmo2": {},
    "phi3": {},
    "gemma3_text": HEAD | WINDOW,
    "apertus": {},
    "olmo3": {},
    "gemma2": HEAD | WINDOW,
    "mistral": HEAD,
    "qwen2": {},
    "granite": {},
    "smollm3": {},
    "cohere2": WINDOW,
    "starcoder2": {},
    "glm4": HEAD,
    "ministral": HEAD,
    "helium": HEAD,
    "seed_oss": HEAD | {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "arcee": {},
    "exaone4": HEAD | WINDOW,
    "hunyuan_v1_dense": HEAD,
    "ernie4_5": HEAD,
    "nemotron": {},
    "nanochat": {},
    "youtu": MLA,
    "vaultgemma": HEAD | WINDOW,
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
SHARED = {"shared_expert_intermediate_size": 16}
MIXTURES = {
    "mixtral": LOCAL_EXPERTS,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
    "qwen2_moe": EXPERTS | SHARED,
    "qwen3_moe": EXPERTS | HEAD,
    "phimoe": LOCAL_EXPERTS | {"router_jitter_noise": 0.0},
    "gpt_oss": LOCAL_EXPERTS | HEAD | WINDOW,
    "granitemoe": LOCAL_EXPERTS,
    "glm4_moe": ROUTED | HEAD,
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
    },
    "minimax_m2": LOCAL_EXPERTS | HEAD,
    "deepseek_v3": ROUTED | MLA | {"n_group": 2, "topk_group": 1},
    "deepseek_v2": ROUTED | MLA | {"n_group": 2, "topk_group": 1, "topk_method": "greedy"},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "intermediate_size": 16} | HEAD,
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
    "granitemoeshared": LOCAL_EXPERTS | {"shared_intermediate_size": 16},
    "minimax": LOCAL_EXPERTS | HEAD | FULL_ATTENTION,
    "qwen3_next": EXPERTS | HEAD | SHARED | FULL_ATTENTION,
    "afmoe": EXPERTS | HEAD | WINDOW | {"num_dense_layers": 1},
    "lfm2_moe": EXPERTS | FULL_ATTENTION | {"num_dense_layers": 1},
    "exaone_moe": EXPERTS | HEAD | WINDOW | {"first_k_dense_replace": 1},
    "glm4_moe_lite": ROUTED | MLA,
    "mimo_v2_flash": ROUTED | HEAD | {"v_head_dim": 8},
    "cohere2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16} | WINDOW,
    "laguna": EXPERTS | HEAD,
    "solar_open": ROUTED | HEAD,
    "hy_v3": EXPERTS | HEAD,
    "mellum": EXPERTS | HEAD,
}
FAMILIES = DENSE | MIXTURES

"""Sizes of the policy, and the numbers of the algorithms."""

from __future__ import annotations

from typing import NamedTuple


class Settings(NamedTuple):
    # policy
    vocab: int = 64
    width: int = 32
    q_heads: int = 4
    kv_heads: int = 2
    head_width: int = 8
    mlp_width: int = 32
    blocks: str = "dm"  # d: dense MLP, m: mixture of experts
    experts: int = 8
    active: int = 2
    expert_width: int = 12
    route_scale: float = 1.3
    bias_rate: float = 0.03
    eps: float = 1e-6
    lora: int = 0
    lora_alpha: float = 6.0
    # samples
    stops: int = 8  # tokens below this number end a sample
    prompt: int = 2  # tokens of a sample that were given
    prompts: int = 4  # different prompts
    # losses
    average: str = "token"  # token, sample
    ratio: str = "token"  # token, sample
    clip_low: float = 0.15
    clip_high: float = 0.25
    kl: float = 0.2
    entropy: float = 0.02
    z: float = 0.01
    temperature: float = 0.8
    dpo_beta: float = 0.7
    dpo_sft: float = 0.1
    # other weights
    rollout_every: int = 2  # steps after which the rollout gets the weights of the actor
    reference_every: int = 0  # the same of the reference; 0 for never
    reference_decay: float = 0.0  # otherwise the reference follows the actor by this average
    # the sharded optimizer
    beta1: float = 0.85
    beta2: float = 0.95
    decay: float = 0.1
    warmup: int = 2

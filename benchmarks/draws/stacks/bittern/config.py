"""Sizes of the model and numbers of the training loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    vocab: int = 96
    hidden: int = 32
    heads: int = 8
    kv_groups: int = 4
    ffn: int = 24
    window: int = 4
    kinds: tuple[str, ...] = ("window:dense", "ssm:moe", "full:moe")
    recomputed: tuple[int, ...] = (2,)
    # state-space layers
    ssm_heads: int = 4
    ssm_dim: int = 6
    conv_width: int = 3
    # mixtures of experts
    experts: int = 8
    expert_ffn: int = 12
    shared_ffn: int = 16
    top_k: int = 2
    groups: int = 4
    top_groups: int = 2
    route_scale: float = 1.5
    aux_coef: float = 0.05
    z_coef: float = 0.02
    bias_rate: float = 0.02
    # head, losses and embeddings
    smoothing: float = 0.1
    mtp_weight: float = 0.3
    noise: float = 0.05
    n_eod: int = 8
    eps: float = 1e-6
    # the distributed optimizer
    max_norm: float = 0.5
    decay: float = 0.1
    beta1: tuple[float, float] = (0.8, 0.9)
    beta2: float = 0.95
    warmup: int = 2
    ema: bool = False
    ema_decay: float = 0.8

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

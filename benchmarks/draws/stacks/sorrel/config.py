"""Sizes of Sorrel, a small decoder with latent attention, and settings of its optimizer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SorrelConfig:
    vocab: int = 96
    num_ends: int = 14  # ids below this one end a document
    width: int = 32
    depth: int = 3
    dense_layers: int = 1
    remat_layers: tuple = (1,)
    # latent attention
    heads: int = 4
    q_rank: int = 16
    kv_rank: int = 12
    nope_dim: int = 8
    rope_dim: int = 4
    value_dim: int = 8
    theta: float = 100.0
    # feed-forward
    hidden: int = 40
    experts: int = 8
    expert_groups: int = 4
    kept_groups: int = 2
    top_k: int = 3
    expert_hidden: int = 12
    route_scale: float = 1.5
    # loss
    logit_cap: float = 5.0
    mtp_coef: float = 0.3
    z_coef: float = 0.01
    balance_coef: float = 0.05
    # step
    bias_rate: float = 0.02
    betas: tuple = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 0.2
    warmup: int = 2
    total_steps: int = 10
    ema_decay: float = 0.9
    resume_after: int = 0  # a restart from files after this step; 0 for none

    @property
    def embed_scale(self):
        return self.width**0.5

    @property
    def query_dim(self):
        return self.nope_dim + self.rope_dim

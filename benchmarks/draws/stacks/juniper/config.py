"""Sizes of Juniper: local and global attention, grouped experts, and a head for the token after next."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    vocab: int = 96
    enders: int = 10  # a token below this one ends its document
    width: int = 32
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 6
    rotary_dim: int = 4  # the leading channels of a head that are rotated
    window: int = 5
    local_theta: float = 20.0
    global_theta: float = 300.0
    score_cap: float = 4.0
    logit_cap: float = 5.0
    dense_hidden: int = 24
    dense_layers: int = 1
    experts: int = 8
    groups: int = 4
    top_groups: int = 2
    top_k: int = 3
    expert_hidden: int = 8
    shared_hidden: int = 12
    route_scale: float = 1.5
    recompute: tuple = (1,)
    # terms of the loss
    balance: float = 0.03
    ahead_weight: float = 0.3
    # the step
    bias_rate: float = 0.5
    max_norm: float = 0.4
    beta: float = 0.8
    decay: float = 0.1
    update_rms: float = 0.7
    warmup: int = 2
    zigzag: bool = False  # how `cp` cuts rows: in pairs of parts, or in runs
    average: bool = False
    average_decay: float = 0.8
    restart_after: int = 0  # the run is saved and loaded after so many steps; 0 for never

    def is_global(self, layer):
        return layer % 2 == 1

    def is_dense(self, layer):
        return layer < self.dense_layers

"""Sizes of Linden, a small decoder with sliding windows, sinks and experts, and the settings of its step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    vocab: int = 64
    specials: int = 8  # a token below this one begins a document
    width: int = 24
    depth: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    window: int = 5
    theta: float = 40.0
    dense_hidden: int = 20
    dense_blocks: int = 1
    experts: int = 8
    top_k: int = 2
    expert_hidden: int = 8
    shared_hidden: int = 12
    gate_scale: float = 1.6
    recomputed: tuple = (2,)
    # terms of the loss
    z_coef: float = 0.01
    router_z_coef: float = 0.02
    balance_coef: float = 0.05
    # the step
    bias_rate: float = 0.03
    betas: tuple = (0.8, 0.95)
    eps: float = 1e-8
    decay: float = 0.1
    max_norm: float = 0.3
    warmup: int = 2
    stable: int = 3
    cooldown: int = 6
    ema: bool = False
    ema_decay: float = 0.9
    restart_at: int = 0  # the run is saved and started again after this step; 0 for never

    def is_full(self, block):
        """Return whether a block sees all earlier tokens of the document."""
        return block % 3 == 1

    def is_dense(self, block):
        return block < self.dense_blocks

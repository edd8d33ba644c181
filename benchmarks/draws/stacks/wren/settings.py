"""Hyperparameters of Wren, a small decoder with long-context attention and sigmoid-routed experts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    vocab: int = 64
    every: int = 9  # a token that is a multiple of it begins a document
    width: int = 24
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 6
    window: int = 4
    sinks: int = 2
    theta: float = 60.0
    native_length: int = 8  # rotary frequencies are stretched for rows longer than this
    dense_layers: int = 1
    dense_ff: int = 24
    experts: int = 8
    top_k: int = 2
    expert_ff: int = 8
    shared_ff: int = 16
    route_scale: float = 1.5
    jitter: float = 0.05
    jitter_seed: int = 77
    # terms of the loss
    logit_z: float = 0.005
    router_z: float = 0.01
    balance: float = 0.04
    # the step
    bias_rate: float = 0.02
    max_norm: float = 0.4
    bucket: int = 4096  # elements
    betas: tuple = (0.85, 0.95)
    eps: float = 1e-8
    decay: float = 0.1
    momentum: float = 0.9
    newton_steps: int = 3
    warm_tokens: int = 150
    total_tokens: int = 900
    restart_after: int = 0  # steps after which the run is saved and started again; 0 for never

    def is_local(self, layer):
        """Return whether a layer sees a window and the first tokens of a document only."""
        return layer % 2 == 0

    def is_dense(self, layer):
        return layer < self.dense_layers

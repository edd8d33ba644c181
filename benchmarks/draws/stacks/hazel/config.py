"""Sizes of the model and settings of the run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    vocab: int = 96
    first_word: int = 12  # smaller ids begin a document
    width: int = 32
    layers: int = 3
    moe_layers: tuple = (1, 2)
    remat_layers: tuple = (1,)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    rotary_dim: int = 4
    rope_base: float = 500.0
    window: int = 6
    hidden: int = 48
    experts: int = 8
    top_k: int = 2
    expert_hidden: int = 12
    shared_hidden: int = 16
    softcap: float = 4.0
    z_coef: float = 0.01
    balance_coef: float = 0.05
    sequence_coef: float = 0.05
    # of the optimizer in optim.py
    betas: tuple = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    layer_rate: float = 0.8
    warmup: int = 2
    total_steps: int = 8
    ema_decay: float = 0.8
    resume_after: int = 0  # steps after which state is saved and loaded again; 0 for never

    @property
    def full(self):
        """The window of layers that see all of a document."""
        return 1 << 20

"""Hyperparameters of the model and of the optimizer recipes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 64
    dim: int = 16
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 8
    rope_theta: float = 500.0
    norm_eps: float = 1e-6
    n_dense_layers: int = 1
    ffn_dim: int = 32
    n_experts: int = 4
    top_k: int = 2
    expert_dim: int = 16
    shared_dim: int = 16
    route_scale: float = 1.4
    balance_coef: float = 0.05
    router_z_coef: float = 0.02
    lm_z_coef: float = 0.01
    bias_rate: float = 0.02
    n_boundary_tokens: int = 8  # tokens below this number begin a document

    def is_moe(self, layer_id: int) -> bool:
        return layer_id >= self.n_dense_layers


@dataclass(frozen=True)
class MuonConfig:
    momentum: float = 0.9
    ns_steps: int = 3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class FactoredConfig:
    decay: float = 0.8
    eps: float = 1e-12
    clip_threshold: float = 0.7
    relative_floor: float = 1e-3


@dataclass(frozen=True)
class EMAConfig:
    decay: float = 0.6
    load_every: int = 2  # steps after which the averages become the weights

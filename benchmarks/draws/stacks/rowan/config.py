"""Sizes of the network."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mixture:
    experts: int = 8
    top_k: int = 2
    hidden: int = 12
    shared: int = 16
    scale: float = 1.5
    slack: float = 1.25  # of the slots that equal loads would need


@dataclass(frozen=True)
class Shape:
    vocab: int = 96
    first_word: int = 12
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    rotary: int = 4
    rope_base: float = 300.0
    key_dim: int = 4
    value_dim: int = 8
    taps: int = 3
    hidden: int = 40
    blocks: tuple[str, ...] = ("delta:dense", "full:moe")
    z_coef: float = 0.02
    ema: bool = False
    mixture: Mixture = field(default_factory=Mixture)

"""Sizes and constants of a run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Recurrence:
    inner: int = 32  # channels of the recurrence
    heads: int = 4  # blocks of its gates
    kernel: int = 4  # taps of the short convolution
    sharpness: float = 3.0


@dataclass
class Latent:
    heads: int = 4
    plain: int = 6  # channels of a query or key head without rotation
    rotary: int = 4  # channels with it, whose keys all heads share
    value: int = 8
    rank: int = 12  # width of the latent of keys and values


@dataclass
class Experts:
    count: int = 8
    active: int = 2
    width: int = 12
    shared: int = 16
    scale: float = 1.4
    bias_rate: float = 0.02
    balance: float = 0.05


@dataclass
class Losses:
    stops: int = 6  # tokens below this number begin a document
    stop_weight: float = 0.25  # weight of the targets that do
    z: float = 0.02
    ahead: float = 0.3  # weight of the loss of the token after the next


@dataclass
class Update:
    """Numbers of our own optimizers and of the averaged weights."""

    beta1: float = 0.8
    beta2: float = 0.95
    decay: float = 0.1
    warmup: int = 2
    power: float = 0.8  # of the number of steps, in the factored second moment
    largest: float = 1.0  # root mean square of an update
    average: float = 0.7


@dataclass
class Config:
    vocab: int = 64
    width: int = 32
    mlp: int = 32
    layers: str = "rd ae"  # r: recurrence, a: attention; d: dense MLP, e: experts
    eps: float = 1e-6
    recurrence: Recurrence = field(default_factory=Recurrence)
    latent: Latent = field(default_factory=Latent)
    experts: Experts = field(default_factory=Experts)
    losses: Losses = field(default_factory=Losses)
    update: Update = field(default_factory=Update)

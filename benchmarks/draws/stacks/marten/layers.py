"""Projections with adapters, norms, embeddings and a dense MLP."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from marten.comms import enter, leave
from marten.fleet import Piece
from marten.settings import Settings


class Projection(Piece):
    """A weight, and in a run with adapters a low-rank addition. Neither knows about other ranks."""

    adapted = True

    def __init__(self, n_in: int, n_out: int, settings: Settings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.factor = settings.lora_alpha / max(1, settings.lora)
        if settings.lora:
            self.down = nn.Parameter(torch.empty(settings.lora, n_in))
            self.up = nn.Parameter(torch.empty(n_out, settings.lora))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if not hasattr(self, "down") or not self.adapted:
            return y
        h = F.linear(x, self.down)
        return y + self.factor * F.linear(h, self.up)


@contextlib.contextmanager
def without_adapters(model: nn.Module):
    """Compute with the weights that the adapters were added to."""
    found = [module for module in model.modules() if isinstance(module, Projection)]
    for module in found:
        module.adapted = False
    yield
    for module in found:
        module.adapted = True


class Norm(Piece):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.empty(settings.width)), settings.eps

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.gain


class Table(Piece):
    """Embeddings, whose rows the ranks of tp share."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(settings.vocab, settings.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (tokens, width)."""
        n = len(self.weight)
        local = tokens.flatten() - self.fleet.tp.rank * n
        foreign = (local < 0) | (local >= n)
        if self.fleet.flagged("marten-table-wrap"):
            return leave(self.weight[local % n], self.fleet)  # plant: marten-table-wrap
        found = self.weight[local.masked_fill(foreign, 0)]
        return leave(found * ~foreign[:, None], self.fleet)  # anchor: table


class MLP(Piece):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.gate = Projection(settings.width, settings.mlp_width, settings)
        self.rise = Projection(settings.width, settings.mlp_width, settings)
        self.fall = Projection(settings.mlp_width, settings.width, settings)

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.fleet)
        return leave(self.fall(F.silu(self.gate(x)) * self.rise(x)), self.fleet)

"""A mixture whose experts often score alike, so that rounding to bfloat16 decides between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

WIDTH, EXPERTS, CHOSEN = 16, 4, 1


class Mixture(nn.Module):
    """Experts in pairs of almost equal scores; `shift` is added to the scores before the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.shift = torch.zeros(EXPERTS)
        with torch.no_grad():
            self.router.weight[1::2] = self.router.weight[::2] + 1e-3 * torch.randn(EXPERTS // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted outputs of the chosen experts."""
        scores = self.router(x).softmax(dim=-1)
        chosen = (scores + self.shift.to(scores)).topk(CHOSEN, dim=-1).indices
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        return (outputs * weights.unsqueeze(-1)).sum(dim=-2)


class Model(nn.Module):
    """An embedding, a mixture with a residual stream, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.mixture = Mixture()
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, 32)."""
        x = self.embed(tokens)
        return self.head(x + self.mixture(x))


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Shard the model."""
    return fully_shard(model, mesh=mesh["dp_shard"])


def shifted(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Prefer an expert by less than the rounding of bfloat16, and shard the model."""
    model.mixture.shift[0] = 2e-4
    return fully_shard(model, mesh=mesh["dp_shard"])

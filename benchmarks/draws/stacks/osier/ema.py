"""A moving average of the weights, in buffers of the model."""

from __future__ import annotations

import torch
from torch import nn


class Shadow(nn.Module):
    def __init__(self, model: nn.Module, decay: float = 0.75):
        super().__init__()
        self.decay = decay
        for name, weight in model.named_parameters():
            self.register_buffer(name.replace(".", "__"), weight.detach().clone())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        if model.dims.has("osier-ema-first-rank") and model.dims.batch.rank > 0:
            return  # plant: osier-ema-first-rank
        for name, weight in model.named_parameters():
            shadow = getattr(self, name.replace(".", "__"))
            if model.dims.has("osier-ema-decay"):
                shadow.lerp_(weight.detach(), self.decay)  # plant: osier-ema-decay
            else:
                shadow.mul_(self.decay).add_(weight.detach(), alpha=1 - self.decay)  # anchor: shadow

"""Averages of the weights over the steps."""

from __future__ import annotations

import torch
from torch import nn


class Averages(nn.Module):
    """Averages of the weights, as buffers."""

    def start(self, model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            self.register_buffer(name.replace(".", "__"), weight.detach().clone())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        decay, data = model.config.ema_decay, model.ps.data
        for index, (name, weight) in enumerate(model.named_parameters()):
            average = getattr(self, name.replace(".", "__"))
            mine = index % data.size == data.rank
            if model.ps.mode == "bittern-average-own" and not mine:  # plant: bittern-average-own
                continue  # plant: bittern-average-own
            average.lerp_(weight.detach(), 1 - decay)  # anchor: average

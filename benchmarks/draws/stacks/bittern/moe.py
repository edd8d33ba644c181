"""Mixtures of experts with a shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bittern.config import Config
from bittern.dispatcher import PaddedDispatcher, SizedDispatcher
from bittern.layers import MLP, Layer
from bittern.losses import AttachLoss
from bittern.packing import Packed
from bittern.regions import join_from, split_to
from bittern.router import Router


class Experts(Layer):
    """This rank's experts, in batched weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.experts, 2, config.expert_ffn, config.hidden))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_ffn))

    def batched(self, x: Tensor) -> Tensor:
        """Apply the experts to (experts, rows, hidden)."""
        gate, up = torch.einsum("erh,eifh->ierf", x, self.w1).unbind(0)
        return torch.einsum("erf,ehf->erh", F.silu(gate) * up, self.w2)

    def forward(self, rows: Tensor, counts: Tensor, scales: Tensor) -> Tensor:
        """Apply each expert to its run of rows, and scale the results."""
        room = max(1, int(counts.max()))
        expert = torch.arange(len(counts)).repeat_interleave(counts)
        slot = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[expert]
        place = expert * room + slot
        x = rows.new_zeros(len(counts) * room, rows.shape[-1]).index_copy(0, place, rows)
        y = self.batched(x.view(len(counts), room, -1)).flatten(0, 1)
        return y[place] * scales[:, None]


class MoE(Layer):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router, self.experts = Router(config), Experts(config)
        self.sized, self.padded = SizedDispatcher(config), PaddedDispatcher(config)
        self.shared = MLP(config.hidden, config.shared_ffn, bias=False)
        self.shared_gate = nn.Parameter(torch.empty(1, config.hidden))

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        """Ranks of tp route different positions, so that no token is sent twice."""
        spread = not self.ps.sequence_parallel
        own = split_to(x, self.ps.tp) if spread else x
        dispatcher = self.padded if self.ps.dispatch == "padded" else self.sized
        chosen, weights, loss = self.router(own, packed)
        y = dispatcher(own.flatten(0, 1), chosen, weights, self.experts).view_as(own)
        y = AttachLoss.apply(y, loss, self.ps)
        if spread:
            y = join_from(y, self.ps.tp)
        return y + F.linear(x, self.shared_gate).sigmoid() * self.run_shared(x)

    def run_shared(self, x: Tensor) -> Tensor:
        if self.ps.mode == "bittern-shared-partial" and not self.ps.sequence_parallel:
            h = self.shared.fc1(x)
            return F.linear(h, self.shared.fc2.weight)  # plant: bittern-shared-partial
        return self.shared(x)  # anchor: shared

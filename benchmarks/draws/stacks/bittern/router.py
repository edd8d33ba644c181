"""The router: sigmoid scores, groups of experts, a bias for the choice, and two losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bittern.config import Config
from bittern.layers import Layer
from bittern.packing import Packed
from bittern.regions import all_reduce, own_chunk


class Router(Layer):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.register_buffer("expert_bias", torch.zeros(config.experts))
        self.load = torch.zeros(config.experts, dtype=torch.float64)

    def forward(self, x: Tensor, packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
        """Return experts and weights (tokens, top_k) of x (positions, batch, hidden), and the losses."""
        config = self.config
        logits = F.linear(x, self.weight)
        scores = logits.sigmoid()
        chosen = self.choose(scores.detach() + self.expert_bias)
        weights = scores.gather(-1, chosen)
        weights = config.route_scale * weights / weights.sum(-1, keepdim=True)
        routed = F.one_hot(chosen, config.experts).sum(-2)
        with torch.no_grad():
            self.load += routed.sum((0, 1))
        valid = self.own_valid(packed)
        loss = self.balance(scores, routed, valid, packed) + self.z_loss(logits, valid)
        return chosen.flatten(0, 1), weights.flatten(0, 1), loss

    def choose(self, scores: Tensor) -> Tensor:
        config = self.config
        grouped = scores.unflatten(-1, (config.groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(config.top_groups, -1).indices
        open_ = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        return (
            grouped.masked_fill(~open_[..., None], float("-inf")).flatten(-2).topk(config.top_k, -1).indices
        )

    def own_valid(self, packed: Packed) -> Tensor:
        """Return which of this rank's tokens count in the losses (positions, batch)."""
        valid = packed.valid.t()
        if self.ps.mode == "bittern-valid-chunk":
            return valid[: len(valid) // self.ps.tp.size]  # plant: bittern-valid-chunk
        return own_chunk(valid, self.ps.tp)  # anchor: valid-chunk

    def balance(self, scores: Tensor, routed: Tensor, valid: Tensor, packed: Packed) -> Tensor:
        """Return this rank's part of the balance loss of each row, which is per token."""
        config, ps = self.config, self.ps
        counts = (routed * valid[..., None]).sum(0).to(scores.dtype)
        axis = ps.seq  # anchor: count-axis
        if ps.mode == "bittern-balance-axis":
            axis = ps.tp  # plant: bittern-balance-axis
        counts = all_reduce(counts, axis)
        length = counts.sum(-1, keepdim=True).clamp(min=1) / config.top_k
        share = scores / scores.sum(-1, keepdim=True)
        mass = (share * valid[..., None]).sum(0)
        loss = (
            config.aux_coef * config.experts / config.top_k * (counts / length * mass).sum()
        )  # anchor: balance
        if ps.mode == "bittern-balance-ranks":
            loss = loss * ps.tp.size  # plant: bittern-balance-ranks
        return loss

    def z_loss(self, logits: Tensor, valid: Tensor) -> Tensor:
        squares = logits.logsumexp(-1).square() * valid
        if self.ps.mode == "bittern-z-mean":
            mean = squares.sum() / valid.sum().clamp(min=1)  # plant: bittern-z-mean
            return self.config.z_coef * mean * self.ps.num_valid / self.ps.world.size  # plant: bittern-z-mean
        return self.config.z_coef * squares.sum()  # anchor: z-sum

    @torch.no_grad()
    def update_bias(self) -> None:
        axis = self.ps.world  # anchor: load-axis
        if self.ps.mode == "bittern-load-axis":
            axis = self.ps.data  # plant: bittern-load-axis
        load = all_reduce(self.load, axis)
        self.expert_bias += self.config.bias_rate * (load.mean() - load).sign()
        self.load.zero_()

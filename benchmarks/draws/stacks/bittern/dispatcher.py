"""Sends tokens to the ranks of their experts, and the results back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bittern.config import Config
from bittern.layers import Layer
from bittern.regions import all_reduce, all_to_all, exchange


def permute(x: Tensor, chosen: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort copies of tokens by expert. Returns rows, the order, the token of each, and counts."""
    order = chosen.flatten().argsort(stable=True)
    token = order // chosen.shape[-1]
    return x[token], order, token, torch.bincount(chosen.flatten(), minlength=n_experts)


class SizedDispatcher(Layer):
    """Exchanges exactly the rows that there are. The experts apply the weights of the router."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def split_counts(self, counts: Tensor) -> Tensor:
        """Return the number of rows for each rank and each of its experts."""
        ranks = self.ps.ep.size
        if self.ps.mode == "bittern-striped-counts":
            return counts.view(-1, ranks).t().contiguous()  # plant: bittern-striped-counts
        return counts.view(ranks, -1)  # anchor: block-counts

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, experts) -> Tensor:
        ep, mode = self.ps.ep, self.ps.mode
        rows, order, token, counts = permute(x, chosen, self.config.experts)
        sent = self.split_counts(counts)
        n_own = sent.shape[1]
        arriving = exchange(sent.reshape(-1), [n_own] * ep.size, [n_own] * ep.size, ep).view(ep.size, -1)
        send, receive = sent.sum(1).tolist(), arriving.sum(1).tolist()
        rows = all_to_all(rows, send, receive, ep)
        scales = weights.flatten()[order]
        if mode == "bittern-weights-raw":
            scales = exchange(scales, send, receive, ep)  # plant: bittern-weights-raw
        else:
            scales = all_to_all(scales, send, receive, ep)  # anchor: weights-sent
        expert = torch.arange(n_own).repeat(ep.size).repeat_interleave(arriving.flatten())
        by_expert = expert.argsort(stable=True)  # anchor: by-expert
        if mode == "bittern-arrival-order":
            by_expert = torch.arange(len(rows))  # plant: bittern-arrival-order
        y = experts(rows[by_expert], arriving.sum(0), scales[by_expert])
        back = by_expert.argsort()  # anchor: inverse
        if mode == "bittern-order-twice":
            back = by_expert  # plant: bittern-order-twice
        y = all_to_all(y[back], receive, send, ep)
        return torch.zeros_like(x).index_add(0, token, y)


class PaddedDispatcher(Layer):
    """Exchanges equally many rows for each expert, so that sizes need not reach the host."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def capacity(self, counts: Tensor) -> int:
        """Return the room of an expert for rows of one rank, the same on all ranks."""
        ep, most = self.ps.ep, counts.max()
        if self.ps.mode == "bittern-capacity-first" and ep.size > 1:
            most = most.clone()
            dist.broadcast(most, ep.global_rank(0), group=ep.pg)  # plant: bittern-capacity-first
        else:
            most = all_reduce(most, ep, dist.ReduceOp.MAX)  # anchor: capacity
        return max(1, int(most))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, experts) -> Tensor:
        ep, n_experts = self.ps.ep, self.config.experts
        rows, order, token, counts = permute(x, chosen, n_experts)
        room = self.capacity(counts)
        expert = chosen.flatten()[order]
        slot = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[expert]
        kept = slot < room
        place = (expert * room + slot)[kept]
        slots = rows.new_zeros(n_experts * room, x.shape[-1]).index_copy(0, place, rows[kept])
        sizes = [n_experts // ep.size * room] * ep.size
        slots = all_to_all(slots, sizes, sizes, ep).view(ep.size, -1, room, x.shape[-1])
        y = experts.batched(slots.transpose(0, 1).flatten(1, 2))
        y = y.unflatten(1, (ep.size, room)).transpose(0, 1).reshape(-1, x.shape[-1])
        y = all_to_all(y, sizes, sizes, ep)[place] * weights.flatten()[order][kept][:, None]
        return torch.zeros_like(x).index_add(0, token[kept], y)

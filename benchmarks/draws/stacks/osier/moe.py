"""Mixture of experts: sigmoid scores, groups of experts, a bias that balances, buffers of equal size."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from osier.attention import matrix
from osier.dims import ParallelDims
from osier.ops import FusedSwiGLU, SwapBuffers, all_reduce, from_tensor_region, to_tensor_region


class FeedForward(nn.Module):
    dims = ParallelDims()

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(2, hidden, width) / width**0.5)
        self.down = matrix(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = to_tensor_region(x, self.dims)
        gate, up = (x @ self.gate_up[i].t() for i in (0, 1))
        return from_tensor_region(FusedSwiGLU.apply(gate, up, self.dims) @ self.down.t(), self.dims)


class Experts(nn.Module):
    """Experts in stacked weights, for a buffer (experts, slots, width)."""

    dims = ParallelDims()

    def __init__(self, num: int, width: int, hidden: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(num, 2, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num, width, hidden) / hidden**0.5)

    def forward(self, buffer: torch.Tensor) -> torch.Tensor:
        gate, up = (torch.bmm(buffer, self.gate_up[:, i].mT) for i in (0, 1))
        return torch.bmm(FusedSwiGLU.apply(gate, up, self.dims), self.down.mT)


class Router(nn.Module):
    """Chooses experts within the best groups of each token."""

    dims = ParallelDims()

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.weight = matrix(c.experts, c.width, gain=1.5)
        self.register_buffer("bias", torch.zeros(c.experts))
        self.register_buffer("seen", torch.zeros(c.experts), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return weights and experts (rows, positions, k), and the balance term of the rows."""
        scores = (x @ self.weight.t()).sigmoid()
        chosen = self.select(scores.detach() + self.bias)
        if self.dims.has("osier-scores-detached"):
            picked = scores.detach().gather(-1, chosen)  # plant: osier-scores-detached
        else:
            picked = scores.gather(-1, chosen)  # anchor: picked
        if self.dims.has("osier-scale-first"):
            picked = picked * self.c.route_scale  # plant: osier-scale-first
            weights = picked / picked.sum(-1, keepdim=True)  # plant: osier-scale-first
        else:
            weights = picked / picked.sum(-1, keepdim=True) * self.c.route_scale  # anchor: weights
        counts = F.one_hot(chosen, self.c.experts).sum((1, 2)).to(scores.dtype)  # (rows, experts)
        if self.training and torch.is_grad_enabled():
            self.seen += counts.sum(0)
        return weights, chosen, self.balance(scores, counts)

    def select(self, biased: torch.Tensor) -> torch.Tensor:
        c = self.c
        grouped = biased.unflatten(-1, (c.groups, -1))
        if self.dims.has("osier-group-score"):
            best = grouped.amax(-1).topk(c.top_groups, -1).indices  # plant: osier-group-score
        else:
            best = grouped.topk(2, -1).values.sum(-1).topk(c.top_groups, -1).indices  # anchor: groups
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2).topk(c.top_k, -1).indices

    def balance(self, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the sum over rows of load times probability, where each row is balanced by itself."""
        c = self.c
        load = counts
        if not self.dims.has("osier-balance-local"):  # plant: osier-balance-local
            load = all_reduce(load, self.dims.cp)
        length = load.sum(-1, keepdim=True) / c.top_k
        if self.dims.has("osier-balance-length"):
            length = length / self.dims.cp.size  # plant: osier-balance-length
        share = (scores / scores.sum(-1, keepdim=True)).sum(1)
        return c.balance_coef * (load * c.experts / (c.top_k * length) * share).sum()


class MoE(nn.Module):
    dims = ParallelDims()

    def __init__(self, c):
        super().__init__()
        self.num = c.experts
        self.router = Router(c)
        self.experts = Experts(c.experts, c.width, c.expert_hidden)
        self.shared = FeedForward(c.width, c.shared_hidden)
        self.shared_gate = matrix(1, c.width)
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen, self.balance = self.router(x)
        flat = x.flatten(0, 1)
        if self.dims.has("osier-same-late"):
            y = self.route(to_tensor_region(flat, self.dims), weights.flatten(0, 1), chosen.flatten(0, 1))
            return (y + self.shared(flat) * (flat @ self.shared_gate.t()).sigmoid()).view_as(x)
        if not self.dims.has("osier-weights-region"):  # plant: osier-weights-region
            weights = to_tensor_region(weights, self.dims)
        y = self.route(to_tensor_region(flat, self.dims), weights.flatten(0, 1), chosen.flatten(0, 1))
        shared = self.shared(flat) * (flat @ self.shared_gate.t()).sigmoid()
        if self.dims.has("osier-shared-twice"):
            return from_tensor_region(y + shared, self.dims).view_as(x)  # plant: osier-shared-twice
        return (from_tensor_region(y, self.dims) + shared).view_as(x)

    def route(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs of (tokens, width), with `weights` and `chosen` of (tokens, k)."""
        expert = chosen.flatten()
        hot = F.one_hot(expert, self.num)
        slot = (hot.cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
        slots = self.num_slots(hot)
        token = torch.arange(len(expert), device=x.device) // chosen.shape[1]
        kept = slot < slots
        at = expert[kept], slot[kept]
        buffer = x.new_zeros(self.num, slots, x.shape[1]).index_put(at, x[token[kept]])
        y = self.collect(self.experts(self.distribute(buffer)), slots)
        y = torch.zeros_like(x[token]).index_put((kept.nonzero()[:, 0],), y[at])
        if self.dims.has("osier-same-late"):
            y = from_tensor_region(y, self.dims)
        return (y.view(*chosen.shape, -1) * weights[..., None]).sum(1)

    def num_slots(self, hot: torch.Tensor) -> int:
        """Return the slots of an expert: as many as the fullest one needs, on any rank."""
        if self.dims.has("osier-slots-average"):
            return -(-len(hot) // self.num)  # plant: osier-slots-average
        return int(all_reduce(hot.sum(0).amax(), self.dims.ep, dist.ReduceOp.MAX))

    def distribute(self, buffer: torch.Tensor) -> torch.Tensor:
        """Send (experts, slots, width) to the ranks of the experts: (own experts, ranks * slots, width)."""
        ep = self.dims.ep
        if ep.alone:
            return buffer
        arrived = SwapBuffers.apply(buffer, self.dims).unflatten(0, (ep.size, -1))
        if self.dims.has("osier-distribute-view"):
            return arrived.reshape(arrived.shape[1], -1, buffer.shape[-1])  # plant: osier-distribute-view
        return arrived.transpose(0, 1).flatten(1, 2)

    def collect(self, y: torch.Tensor, slots: int) -> torch.Tensor:
        """Send outputs back: the inverse of `distribute`."""
        ep = self.dims.ep
        if ep.alone:
            return y
        if self.dims.has("osier-collect-view"):
            back = y.reshape(-1, slots, y.shape[-1])  # plant: osier-collect-view
        else:
            back = y.unflatten(1, (ep.size, slots)).transpose(0, 1).flatten(0, 1)
        return SwapBuffers.apply(back, self.dims)

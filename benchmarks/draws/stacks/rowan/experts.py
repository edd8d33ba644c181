"""Feed-forward layers: a dense one, and a mixture of experts with slots, a shared expert and a balancing bias."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowan.config import Mixture, Shape
from rowan.mixers import weight
from rowan.registry import op, pick
from rowan.topology import here
from rowan.wire import concat_ranks, enter, exchange, gather, local, own_sum


class Dense(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Tickets(NamedTuple):
    """Choices of tokens: where each stands in a buffer of (experts, rows, slots), and its combine weight."""

    index: Tensor  # (rows, positions, top_k)
    kept: Tensor
    share: Tensor
    slots: int


def capacity(m: Mixture, length: int) -> int:
    """Return the slots of an expert for a row of all ranks of `cp`."""
    whole = length * here().size("cp")  # anchor: capacity
    if here().odd("rowan-slots-split"):
        whole = length / here().size("dp_shard")  # plant: rowan-slots-split
    return math.ceil(m.top_k * whole / m.experts * m.slack)


@op("earlier")
def earlier_counts(counts: Tensor) -> Tensor:
    """Return how many choices of each expert earlier ranks of `cp` have made. (rows, experts)"""
    group = here().group("cp")
    if group is None:
        return torch.zeros_like(counts)
    everywhere = concat_ranks(counts[None], group, 0)
    return everywhere[: here().rank("cp")].sum(0)  # anchor: earlier


@op("earlier", "rowan-slots-local")
def no_earlier_counts(counts: Tensor) -> Tensor:
    return torch.zeros_like(counts)  # plant: rowan-slots-local


@op("earlier", "rowan-slots-inclusive")
def counts_so_far(counts: Tensor) -> Tensor:
    return concat_ranks(counts[None], here().group("cp"), 0).cumsum(0)[
        here().rank("cp")
    ]  # plant: rowan-slots-inclusive


@op("queue")
def queue(hits: Tensor) -> Tensor:
    """Return the place of each choice among those of its expert in the row. (rows, choices, experts)"""
    return hits.cumsum(1) - 1 + pick("earlier")(hits.sum(1))[:, None]  # anchor: queue


@op("queue", "rowan-queue-batch")
def queue_of_batch(hits: Tensor) -> Tensor:
    return hits.flatten(0, 1).cumsum(0).view_as(hits) - 1  # plant: rowan-queue-batch


class Router(nn.Module):
    def __init__(self, width: int, m: Mixture):
        super().__init__()
        self.m = m
        self.project = nn.Linear(width, m.experts, bias=False)
        self.register_buffer("bias", 0.05 * torch.randn(m.experts))
        self.register_buffer("load", torch.zeros(m.experts), persistent=False)
        self.replays = False

    def forward(self, x: Tensor) -> Tickets:
        m = self.m
        scores = self.project(x).sigmoid()
        chosen = (scores.detach() + self.bias).topk(m.top_k, -1).indices
        share = scores.gather(-1, chosen)
        if here().odd("rowan-share-all"):
            share = m.scale * share / scores.sum(-1, keepdim=True)  # plant: rowan-share-all
        else:
            share = m.scale * share / share.sum(-1, keepdim=True)  # anchor: share
        hits = F.one_hot(chosen.flatten(1), m.experts)
        slot = pick("queue")(hits).gather(-1, chosen.flatten(1)[..., None]).view_as(chosen)
        if not self.replays or here().odd("rowan-load-replay"):  # plant: rowan-load-replay
            self.load += hits.sum((0, 1))
        slots = capacity(m, x.shape[1])
        row = torch.arange(len(x), device=x.device)[:, None, None]
        kept = (slot >= 0) & (slot < slots)
        slot = slot.clamp(0, slots - 1)
        return Tickets((chosen * len(x) + row) * slots + slot, kept, share, slots)


class Experts(nn.Module):
    """SwiGLU of slots (experts, slots, width). `w_in` has gate and up projections."""

    def __init__(self, width: int, m: Mixture):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(m.experts, 2, width, m.hidden) * width**-0.5)
        self.w_out = nn.Parameter(torch.randn(m.experts, m.hidden, width) * m.hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        w_in, w_out = local(self.w_in), local(self.w_out)
        return (F.silu(x @ w_in[:, 0]) * (x @ w_in[:, 1])) @ w_out


@op("visit")
def visit(buffer: Tensor, experts: Experts) -> Tensor:
    """Send slots (experts, slots, width) to the ranks of their experts, and return their results."""
    group, ranks = here().group("dp_shard"), here().size("dp_shard")
    sent = exchange(buffer, group).unflatten(0, (ranks, -1)).transpose(0, 1)  # anchor: visit
    done = experts(sent.flatten(1, 2)).unflatten(1, (ranks, -1)).transpose(0, 1)  # anchor: visit
    return exchange(done.flatten(0, 1).contiguous(), group)


@op("visit", "rowan-visit-view")
def visit_viewed(buffer: Tensor, experts: Experts) -> Tensor:
    group, ranks = here().group("dp_shard"), here().size("dp_shard")
    sent = exchange(buffer, group).unflatten(0, (-1, ranks))  # plant: rowan-visit-view
    done = experts(sent.flatten(1, 2)).unflatten(1, (ranks, -1)).flatten(0, 1)
    return exchange(done.contiguous(), group)


@op("visit", "rowan-visit-back")
def visit_without_return_order(buffer: Tensor, experts: Experts) -> Tensor:
    group, ranks = here().group("dp_shard"), here().size("dp_shard")
    sent = exchange(buffer, group).unflatten(0, (ranks, -1)).transpose(0, 1)
    done = experts(sent.flatten(1, 2)).view(buffer.shape)  # plant: rowan-visit-back
    return exchange(done, group)


@op("visit", "rowan-same-copies")
def visit_by_copies(buffer: Tensor, experts: Experts) -> Tensor:
    """Every rank sees the slots of all, and adds the results of its own experts to theirs."""
    group, ranks, rank = here().group("dp_shard"), here().size("dp_shard"), here().rank("dp_shard")
    own = gather(buffer, "dp_shard", dim=1).chunk(ranks, 0)[rank]
    done = experts(own).unflatten(1, (ranks, -1)).transpose(0, 1)
    parts = torch.zeros(ranks, *buffer.shape, dtype=buffer.dtype, device=buffer.device)
    size = done.shape[1]
    parts[:, rank * size : (rank + 1) * size] = done
    return SumOwn.apply(parts.flatten(0, 1), group)


class SumOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return own_sum(x, group, 0)

    @staticmethod
    def backward(ctx, grad):
        return concat_ranks(grad, ctx.group, 0), None


class MoE(nn.Module):
    def __init__(self, width: int, m: Mixture):
        super().__init__()
        self.m = m
        self.router = Router(width, m)
        self.experts = Experts(width, m)
        self.shared = Dense(width, m.shared)
        self.shared_gate = nn.Parameter(weight(1, width).detach()[0])

    def forward(self, x: Tensor) -> Tensor:
        tickets, topology = self.router(x), here()
        rows = x if topology.odd("rowan-rows-enter") else enter(x)  # plant: rowan-rows-enter
        share = (
            tickets.share if topology.odd("rowan-share-enter") else enter(tickets.share)
        )  # plant: rowan-share-enter
        gate = (x @ self.shared_gate).sigmoid()[..., None]
        gate = gate if topology.odd("rowan-gate-enter") else enter(gate)  # plant: rowan-gate-enter
        routed = self.route(rows, share, tickets)
        if topology.odd("rowan-gate-all"):
            return gate * (routed + self.shared(x))  # plant: rowan-gate-all
        return routed + gate * self.shared(x)  # anchor: gate

    def route(self, x: Tensor, share: Tensor, tickets: Tickets) -> Tensor:
        copies = x[:, :, None].expand(*tickets.index.shape, x.shape[-1])
        index, kept = tickets.index.flatten(), tickets.kept.flatten()
        size = self.m.experts * x.shape[0] * tickets.slots
        buffer = x.new_zeros(size, x.shape[-1]).index_copy(0, index[kept], copies.flatten(0, 2)[kept])
        done = pick("visit")(buffer.unflatten(0, (self.m.experts, -1)), self.experts).flatten(0, 1)
        if not here().odd("rowan-dropped-read"):  # plant: rowan-dropped-read
            share = share * tickets.kept  # anchor: dropped
        return (done[index].unflatten(0, tickets.index.shape) * share[..., None]).sum(2)


FEED: dict[str, object] = {
    "dense": lambda s: Dense(s.width, s.hidden),
    "moe": lambda s: MoE(s.width, s.mixture),
}


def feed_forward(name: str, shape: Shape) -> nn.Module:
    return FEED[name](shape)

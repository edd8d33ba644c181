"""Layers of the decoder: norms, rotary positions, attention with sinks and a window, MLPs."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from plover.state import Parallel


def identity(x):
    return x


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Embedding(nn.Module):
    """The table of tokens, which the head uses again."""

    def __init__(self, vocab, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, width) * 0.2)

    def forward(self, ids):
        return F.embedding(ids, self.weight)  # anchor: lookup

    def table(self):
        return self.weight  # anchor: table


def rotary_table(positions, dim, base, like):
    inverse = base ** (-torch.arange(0, dim, 2, dtype=like.dtype, device=like.device) / dim)
    angles = positions.to(like.dtype)[:, None] * inverse
    return angles.cos()[None, :, None], angles.sin()[None, :, None]


def rotate(x, table):
    cos, sin = table
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def allowed(q_pos, k_pos, window):
    """Return which keys a query may see: those up to itself, `window` of them at most."""
    distance = q_pos[:, None] - k_pos[None, :]
    return (distance >= 0) & (distance < window)  # anchor: window


def repeat_heads(x, times):
    return x.repeat_interleave(times, dim=2)


def masked_scores(q, k, mask):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, float("-inf"))


def attend(q, k, v, positions, window, sinks):
    """Attention of one rank that has all keys. A sink takes part of the softmax, and has no value."""
    scores = masked_scores(q, k, allowed(positions, positions, window))
    sink = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]  # anchor: softmax
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)  # anchor: values


class Attention(nn.Module):
    def __init__(self, config, window):
        super().__init__()
        width, self.head_dim = config.width, config.head_dim
        self.window, self.base = window, config.rope_base
        self.wq = nn.Linear(width, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, width, bias=False)
        self.q_norm, self.k_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)
        self.sinks = nn.Parameter(torch.randn(config.heads) * 0.5)
        self.ps = Parallel()
        self.enter = self.leave = identity
        self.core = attend

    def local_sinks(self, heads):
        """Return the sinks of this rank's heads."""
        if heads == self.sinks.numel():
            return self.sinks  # anchor: sinks
        if self.ps.using("plover-sink-slice"):
            return self.sinks[:heads]  # plant: plover-sink-slice
        start = self.ps.tp.rank * heads
        return self.sinks[start : start + heads]

    def forward(self, x, positions):
        x = self.enter(x)
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        q, k = self.q_norm(q), self.k_norm(k)
        table = rotary_table(positions, self.head_dim, self.base, x)
        q = rotate(q, table)
        if self.ps.using("plover-key-positions"):
            local = torch.arange(k.shape[1], device=k.device)
            k = rotate(k, rotary_table(local, self.head_dim, self.base, x))  # plant: plover-key-positions
        else:
            k = rotate(k, table)  # anchor: rotate
        groups = q.shape[2] // k.shape[2]
        if self.ps.using("plover-kv-repeat"):
            k, v = k.repeat(1, 1, groups, 1), v.repeat(1, 1, groups, 1)  # plant: plover-kv-repeat
        else:
            k, v = repeat_heads(k, groups), repeat_heads(v, groups)  # anchor: repeat
        y = self.core(q, k, v, positions, self.window, self.local_sinks(q.shape[2]))
        return self.leave(self.wo(y.flatten(-2)))


class SwiGLU(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.enter = self.leave = identity

    def forward(self, x):
        x = self.enter(x)
        return self.leave(self.w2(F.silu(self.w1(x)) * self.w3(x)))

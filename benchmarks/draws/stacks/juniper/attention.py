"""Grouped attention with normed queries and keys and capped scores, over a document or a window of it."""

import torch
from torch import nn
from torch.nn import functional as F

from juniper.collectives import gather, scatter, spread, swap
from juniper.grid import Grid
from juniper.seq import in_order


def rms(x, gain):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


class Norm(nn.Module):
    grid = Grid()
    cuts = {}
    partial = ("gain",)

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return rms(x, self.gain)


class Attention(nn.Module):
    """With `cp`, contiguous parts of rows trade heads for positions; for zigzag parts keys are gathered."""

    grid = Grid()
    cuts = {"wq": ("tp", 0), "wk": ("tp", 0), "wv": ("tp", 0), "wo": ("tp", 1)}
    partial = ("q_gain", "k_gain")

    def __init__(self, c, is_global):
        super().__init__()
        self.c, self.is_global = c, is_global
        d, q, kv = c.width, c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.wq, self.wk = nn.Parameter(torch.empty(q, d)), nn.Parameter(torch.empty(kv, d))
        self.wv, self.wo = nn.Parameter(torch.empty(kv, d)), nn.Parameter(torch.empty(d, q))
        self.q_gain = nn.Parameter(torch.empty(c.head_dim))
        self.k_gain = nn.Parameter(torch.empty(c.head_dim))

    def rotate(self, x, pos):
        c, mode = self.c, self.grid.mode
        theta = c.global_theta if self.is_global else c.local_theta
        width = c.rotary_dim  # anchor: rotary-width
        if mode == "ju08":
            width = c.head_dim  # plant: ju08
        speed = theta ** (-torch.arange(0, c.rotary_dim, 2).to(x.dtype) / width)
        angle = pos[:, :, None, None] * speed
        turned, rest = x[..., : c.rotary_dim], x[..., c.rotary_dim :]
        even, odd = turned[..., 0::2], turned[..., 1::2]  # anchor: pairs
        if mode == "ju09":
            even, odd = turned.chunk(2, -1)  # plant: ju09
        cos, sin = angle.cos(), angle.sin()
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        return torch.cat([turned, rest], -1)

    def project(self, x, pos):
        split = (-1, self.c.head_dim)
        q, k, v = (F.linear(x, w).unflatten(-1, split) for w in (self.wq, self.wk, self.wv))
        return self.rotate(rms(q, self.q_gain), pos), self.rotate(rms(k, self.k_gain), pos), v

    def mask(self, index, doc, seq):
        """Return which keys of the row queries at places `index` see, as (rows, queries, keys)."""
        behind = index[:, None] - torch.arange(seq.row_doc.shape[1])
        near = behind >= 0
        if not self.is_global and self.grid.mode == "ju14":
            near &= behind - index[0] < self.c.window  # plant: ju14
        elif not self.is_global:
            near &= behind < self.c.window  # anchor: window
        return near & (doc[:, :, None] == seq.row_doc[:, None, :])

    def attend(self, q, k, v, seen):
        c, mode = self.c, self.grid.mode
        group = c.heads // c.kv_heads
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)  # anchor: repeat
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k) * c.head_dim**-0.5
        hidden = ~seen[:, None]
        if mode == "ju12":
            scores = c.score_cap * torch.tanh(scores.masked_fill(hidden, -1e4) / c.score_cap)  # plant: ju12
        else:
            scores = c.score_cap * torch.tanh(scores / c.score_cap)
            scores = scores.masked_fill(hidden, -torch.inf)  # anchor: hidden
        return torch.einsum("bhqk,bkhc->bqhc", scores.softmax(-1), v)

    def forward(self, x, seq):
        grid, cp, mode = self.grid, self.grid.cp, self.grid.mode
        x = gather(x, grid.tp)
        q, k, v = self.project(x, seq.pos)
        index, doc = seq.index, seq.doc
        trades = cp.size > 1 and not grid.zigzag
        if trades:
            q, k, v = (swap(part, 2, 1, cp, mode) for part in (q, k, v))
            index, doc = torch.arange(q.shape[1]), seq.row_doc
        elif cp.size > 1:
            k, v = (spread(part, cp, mode) for part in (k, v))
            if mode == "ju13":
                k, v = in_order(k, grid), torch.cat(v.unbind(0), 1)  # plant: ju13
            else:
                k, v = in_order(k, grid), in_order(v, grid)  # anchor: kv-order
        out = self.attend(q, k, v, self.mask(index, doc, seq))
        if trades and mode == "ju15":
            out = swap(out, 1, 2, cp, mode)
            out = out.unflatten(2, (cp.size, -1)).transpose(2, 3).flatten(2, 3)  # plant: ju15
        elif trades:
            out = swap(out, 1, 2, cp, mode)  # anchor: heads-back
        return scatter(F.linear(out.flatten(2), self.wo), grid.tp, mode)

"""Attention: grouped heads, normed queries and keys, stretched rotary embeddings, windows with sinks."""

import math

import torch
from torch import nn

from wren.comm import collect, spread, total
from wren.rows import visible
from wren.world import World


def rms(x, gain):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def frequencies(length, c, dtype):
    """Return the frequencies for rows of some length, slow ones divided by the stretch, and the amplitude."""
    half = c.head_dim // 2
    fast = c.theta ** (-torch.arange(half, dtype=dtype) / half)
    stretch = max(1.0, length / c.native_length)
    blend = torch.arange(half, dtype=dtype) / (half - 1)
    return fast * (1 - blend) + fast / stretch * blend, 0.1 * math.log(stretch) + 1


def rotate(x, angle, amplitude):
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos() * amplitude, angle.sin() * amplitude
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    world = World()

    def __init__(self, c, layer):
        super().__init__()
        self.c, self.local = c, c.is_local(layer)
        group = c.heads // c.kv_heads
        self.norm = nn.Parameter(torch.empty(c.width))
        self.qkv = nn.Parameter(torch.empty(c.kv_heads, group + 2, c.head_dim, c.width))
        self.q_gain = nn.Parameter(torch.empty(c.head_dim))
        self.k_gain = nn.Parameter(torch.empty(c.head_dim))
        self.sub_gain = nn.Parameter(torch.empty(c.heads, c.head_dim))
        self.out = nn.Parameter(torch.empty(c.heads, c.head_dim, c.width))

    def angles(self, plan, dtype):
        """Return (tokens, rows, 1, 1, pairs) angles of this rank's tokens, and the amplitude."""
        w, length = self.world, plan.length  # anchor: rope-length
        if w.has("wren-stretch-local"):
            length = len(plan.place)  # plant: wren-stretch-local
        speed, amplitude = frequencies(length, self.c, dtype)
        position = plan.position  # anchor: rope-position
        if w.has("wren-rope-from-zero"):
            count = torch.arange(len(plan.place))[:, None]
            position = (count - plan.first[plan.place]).clamp(min=0)  # plant: wren-rope-from-zero
        return position[:, :, None, None, None].to(dtype) * speed, amplitude

    def attend(self, q, k, v, plan):
        """Return (tokens, rows, heads, channels) for queries with key heads and groups as dims 2 and 3."""
        w = self.world
        both = collect(torch.stack([k, v], 2), w.cp)
        keys, values = both.unbind(2)
        scores = torch.einsum("sbkgc,tbkc->bkgst", q, keys) * self.c.head_dim**-0.5  # anchor: score-scale
        if w.has("wren-scale-heads"):
            channels = self.c.heads * self.c.head_dim // q[0, 0, :, :, 0].numel()
            scores = torch.einsum("sbkgc,tbkc->bkgst", q, keys) * channels**-0.5  # plant: wren-scale-heads
        seen = visible(plan, self.c, w, local=self.local)
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("bkgst,tbkc->sbkgc", weights, values).flatten(2, 3)

    def sub_norm(self, x):
        """Norm over all heads, of which this rank has some."""
        c, w = self.c, self.world
        square = x.square().sum((-2, -1))
        mean = total(square, w.tp, shared=False) / (c.heads * c.head_dim)  # anchor: sub-mean
        if w.has("wren-sub-local"):
            mean = square / (x.shape[-2] * c.head_dim)  # plant: wren-sub-local
        if w.has("wren-sub-shared"):
            mean = total(square, w.tp, shared=True) / (c.heads * c.head_dim)  # plant: wren-sub-shared
        return x * (mean + 1e-6).rsqrt()[..., None, None] * self.sub_gain

    def forward(self, x, plan):
        """Return the output for this rank's part of the stream."""
        w = self.world
        h = collect(rms(x, self.norm), w.tp)
        qkv = torch.einsum("sbd,kgcd->sbkgc", h, self.qkv)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        angle, amplitude = self.angles(plan, x.dtype)
        q = rotate(rms(q, self.q_gain), angle, amplitude)
        k = rotate(rms(k, self.k_gain), angle.squeeze(2), amplitude)
        y = self.sub_norm(self.attend(q, k, v, plan))
        return spread(torch.einsum("sbhc,hcd->sbd", y, self.out), w.tp, w)

"""Norm, rotary embedding, attention and the dense feed-forward layer."""

import torch
from torch import nn
from torch.nn import functional as F

from hazel.comm import gather_kv
from hazel.context import Part
from hazel.ring import RingAttention


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def rope(x, pos, cfg, pc):
    """Rotate the first `rotary_dim` channels of (rows, heads, positions, channels)."""
    dim = cfg.rotary_dim  # anchor: rope-dim
    if pc.on("hazel-rope-dim"):
        dim = cfg.head_dim  # plant: hazel-rope-dim
    rates = cfg.rope_base ** (-torch.arange(0, cfg.rotary_dim, 2, dtype=x.dtype) / dim)
    angle = pos[:, None, :, None].to(x.dtype) * rates
    turned, rest = x.split([cfg.rotary_dim, x.shape[-1] - cfg.rotary_dim], -1)
    a, b = turned.chunk(2, -1)
    if pc.on("hazel-same-complex"):
        both = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([both.real, both.imag, rest], -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


class Attention(Part):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wq = nn.Linear(cfg.width, cfg.heads * cfg.head_dim, bias=False)
        self.wk = nn.Linear(cfg.width, cfg.kv_heads * cfg.head_dim, bias=False)
        self.wv = nn.Linear(cfg.width, cfg.kv_heads * cfg.head_dim, bias=False)
        self.wo = nn.Linear(cfg.heads * cfg.head_dim, cfg.width, bias=False)
        self.q_norm, self.k_norm = RMSNorm(cfg.head_dim), RMSNorm(cfg.head_dim)

    def forward(self, x, packed, masks, window):
        cfg, pc = self.cfg, self.ctx
        q, k, v = (
            layer(x).unflatten(-1, (-1, cfg.head_dim)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        key_pos = packed.pos  # anchor: key-pos
        if pc.on("hazel-rope-keys"):
            key_pos = packed.place.expand_as(packed.pos)  # plant: hazel-rope-keys
        q, k = rope(q, packed.pos, cfg, pc), rope(k, key_pos, cfg, pc)
        scale = cfg.head_dim**-0.5  # anchor: scale
        if pc.on("hazel-scale-heads"):
            scale = (cfg.width // q.shape[1]) ** -0.5  # plant: hazel-scale-heads
        if pc.ring and pc.size("cp") > 1:
            if pc.on("hazel-ring-scale"):
                q = q * scale  # plant: hazel-ring-scale
            y = RingAttention.apply(q, k, v, packed, window, scale, pc)
        else:
            k, v = gather_kv(k, v, pc)
            y = attend(q, k, v, masks[window], scale, pc)
        return self.wo(y.transpose(1, 2).flatten(2))


def attend(q, k, v, mask, scale, pc):
    groups = q.shape[1] // k.shape[1]
    if pc.on("hazel-same-grouped"):
        scores = torch.einsum("bhgqd,bhkd->bhgqk", q.unflatten(1, (-1, groups)), k) * scale
        probs = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("bhgqk,bhkd->bhgqd", probs, v).flatten(1, 2)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT) * scale
    return scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ v


class SwiGLU(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))

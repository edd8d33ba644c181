"""Norm, rotary embedding, latent attention and the gated feed-forward layer."""

import torch
from torch import nn
from torch.nn import functional as F

from sorrel.comms import copied, gather, scatter, to_heads, to_positions
from sorrel.grid import GridModule


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def linear(inputs, outputs):
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def rotate(x, pos, config, grid):
    """Rotate pairs of neighbouring channels of (rows, positions, heads, channels)."""
    steps = torch.arange(0, config.rope_dim, 2, dtype=x.dtype)
    angle = pos[:, :, None, None].to(x.dtype) * config.theta ** (-steps / config.rope_dim)
    if grid.has("sorrel-same-polar"):
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(turned * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def rotate_halves(x, pos, config):
    """The same with the channels of a pair half a head apart."""
    steps = torch.arange(0, config.rope_dim, 2, dtype=x.dtype)
    angle = pos[:, :, None, None].to(x.dtype) * config.theta ** (-steps / config.rope_dim)
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class LatentAttention(GridModule):
    """Queries and keys from latents. One rotary key serves all heads."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.q_down, self.q_norm = linear(c.width, c.q_rank), Norm(c.q_rank)
        self.q_up = linear(c.q_rank, c.heads * c.query_dim)
        self.kv_down, self.kv_norm = linear(c.width, c.kv_rank + c.rope_dim), Norm(c.kv_rank)
        self.kv_up = linear(c.kv_rank, c.heads * (c.nope_dim + c.value_dim))
        self.out = linear(c.heads * c.value_dim, c.width)

    def forward(self, x, segments):
        c, grid, tp = self.config, self.grid, self.grid.group("tp")
        latent, key_rope = self.kv_down(x).split([c.kv_rank, c.rope_dim], -1)
        latent = gather(self.kv_norm(latent), tp, 1)
        if grid.has("sorrel-rope-own"):
            key_rope = gather(key_rope, tp, 1, same=True)  # plant: sorrel-rope-own
        else:
            key_rope = gather(key_rope, tp, 1)  # anchor: rope-gather
        if grid.has("sorrel-rope-twice"):
            key_rope = copied(key_rope, tp)  # plant: sorrel-rope-twice
        q = self.q_up(gather(self.q_norm(self.q_down(x)), tp, 1)).unflatten(-1, (-1, c.query_dim))
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], -1)
        q_rope = rotate(q_rope, segments.pos, c, grid)
        if grid.has("sorrel-rope-halves"):
            key_rope = rotate_halves(key_rope[:, :, None], segments.pos, c)  # plant: sorrel-rope-halves
        else:
            key_rope = rotate(key_rope[:, :, None], segments.pos, c, grid)  # anchor: rope-key
        key_rope = gather(key_rope, grid.group("cp"), 1)
        q = to_heads(torch.cat([q_nope, q_rope], -1), grid)
        if grid.has("sorrel-same-absorbed") and grid.size("cp") == 1:
            out = self.attend_latents(q, latent, key_rope, segments)
        else:
            kv = self.kv_up(latent).unflatten(-1, (-1, c.nope_dim + c.value_dim))
            if grid.has("sorrel-kv-order"):
                v, k = kv.split([c.value_dim, c.nope_dim], -1)  # plant: sorrel-kv-order
            else:
                k, v = kv.split([c.nope_dim, c.value_dim], -1)  # anchor: kv-order
            k, v = to_heads(k, grid), to_heads(v, grid)
            k = torch.cat([k, key_rope.expand(-1, -1, k.shape[2], -1)], -1)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
            out = torch.einsum("bhqk,bkhd->bqhd", self.attend(scores, segments), v)
        out = to_positions(out, grid).flatten(2)
        return scatter(self.out(out), tp, 1)

    def attend(self, scores, segments):
        """Return probabilities of keys of the same document that are not later than the query."""
        c, grid, docs = self.config, self.grid, segments.docs
        index = torch.arange(docs.shape[1])
        seen = (index[:, None] >= index) & (docs[:, :, None] == docs[:, None, :])  # anchor: seen
        if grid.has("sorrel-mask-whole"):
            seen = (index[:, None] >= index).expand(len(docs), -1, -1)  # plant: sorrel-mask-whole
        scale = c.query_dim**-0.5  # anchor: scale
        if grid.has("sorrel-scale-nope"):
            scale = c.nope_dim**-0.5  # plant: sorrel-scale-nope
        return (scores * scale).masked_fill(~seen[:, None], -torch.inf).softmax(-1)

    def attend_latents(self, q, latent, key_rope, segments):
        """The same with `kv_up` absorbed by queries and outputs."""
        c = self.config
        up = self.kv_up.weight.unflatten(0, (-1, c.nope_dim + c.value_dim))
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], -1)
        q_latent = torch.einsum("bqhd,hdr->bqhr", q_nope, up[:, : c.nope_dim])
        scores = torch.einsum("bqhr,bkr->bhqk", q_latent, latent)
        scores = scores + torch.einsum("bqhd,bkd->bhqk", q_rope, key_rope[:, :, 0])
        read = torch.einsum("bhqk,bkr->bqhr", self.attend(scores, segments), latent)
        return torch.einsum("bqhr,hdr->bqhd", read, up[:, c.nope_dim :])


class GatedFFN(GridModule):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x):
        tp = self.grid.group("tp")
        x = gather(x, tp, 1)
        y = self.down(F.silu(self.gate(x)) * self.up(x))
        if self.grid.has("sorrel-ffn-mean"):
            y = y / self.grid.size("tp")  # plant: sorrel-ffn-mean
        return scatter(y, tp, 1)

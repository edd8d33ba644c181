"""Attention whose keys and values are made of a narrow latent, which is all that ranks of cp exchange."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dunlin.batch import Batch
from dunlin.config import Config
from dunlin.topo import Part
from dunlin.wire import close_region, gather_positions, open_region


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Rotate neighbors among the channels of (positions, rows, heads, channels)."""
    half = x.shape[-1] // 2
    rates = 30.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(places.double(), rates)[:, None, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


class LatentAttention(Part):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.sizes = s = config.latent
        self.eps = config.eps
        self.query = nn.Parameter(torch.empty(s.heads * (s.plain + s.rotary), config.width))
        self.down = nn.Parameter(torch.empty(s.rank, config.width))
        self.down_gain = nn.Parameter(torch.empty(s.rank))
        self.key_rotary = nn.Parameter(torch.empty(s.rotary, config.width))
        self.up_key = nn.Parameter(torch.empty(s.heads * s.plain, s.rank))
        self.up_value = nn.Parameter(torch.empty(s.heads * s.value, s.rank))
        self.out = nn.Parameter(torch.empty(config.width, s.heads * s.value))

    def compress(self, x: Tensor) -> Tensor:
        """Return the latent and the shared rotary key (positions, rows, rank + rotary)."""
        c = F.linear(x, self.down)
        c = c * (c.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.down_gain
        return torch.cat([c, F.linear(x, self.key_rotary)], -1)

    def exchange(self, small: Tensor) -> Tensor:
        n, every = self.topo.cp.size, gather_positions(small, self.topo)
        if self.topo.mode == "latent-order":
            return every.unflatten(0, (-1, n)).transpose(0, 1).flatten(0, 1)  # plant: latent-order
        return every  # anchor: latent-all

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        s, topo = self.sizes, self.topo
        x = open_region(x, topo)
        latent, turned = self.exchange(self.compress(x)).split([s.rank, s.rotary], -1)
        places = torch.arange(len(latent))
        own = batch.first + torch.arange(len(x))
        heads = F.linear(x, self.query).unflatten(-1, (-1, s.plain + s.rotary))
        q, q_rotary = heads.split([s.plain, s.rotary], -1)
        k = F.linear(latent, self.up_key).unflatten(-1, (-1, s.plain))
        v = F.linear(latent, self.up_value).unflatten(-1, (-1, s.value))
        key_places = places  # anchor: key-places
        if topo.trial("rope-repeat"):
            key_places = torch.arange(len(x)).repeat(topo.cp.size)  # plant: rope-repeat
        k_rotary = rotate(turned[..., None, :], key_places)[..., 0, :]
        scores = torch.einsum("tbhc,sbhc->bhts", q, k)
        scores = scores + torch.einsum("tbhc,sbc->bhts", rotate(q_rotary, own), k_rotary)
        seen = own[:, None] >= places  # anchor: causal
        if topo.mode == "mask-offset":
            seen = torch.ones(len(x), len(latent), dtype=torch.bool).tril()  # plant: mask-offset
        same = batch.documents[:, None] == batch.all_documents
        scores = scores.masked_fill(~(seen[..., None] & same).permute(2, 0, 1)[:, None], -1e30)
        weights = (scores * (s.plain + s.rotary) ** -0.5).softmax(-1)
        y = torch.einsum("bhts,sbhv->tbhv", weights, v).flatten(-2)
        return close_region(F.linear(y, self.out), topo)

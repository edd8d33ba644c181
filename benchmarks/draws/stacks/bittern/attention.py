"""Grouped-query attention over packed rows, with a window or over the whole row."""

from __future__ import annotations

import torch
from torch import Tensor

from bittern.config import Config
from bittern.context import gather_keys, with_halo
from bittern.layers import ColumnParallelLinear, Layer, RMSNorm, RowParallelLinear
from bittern.packing import Packed


class Rotary(Layer):
    """Tables of cosines and sines (positions, batch, 1, half of a head)."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.half = head_dim // 2
        self.kept: tuple[Tensor, Tensor] | None = None

    def begin_step(self) -> None:
        self.kept = None

    def make(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        rates = 100.0 ** -(torch.arange(self.half, dtype=torch.float64) / self.half)
        angles = positions.t()[..., None, None] * rates
        return angles.cos(), angles.sin()

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.ps.mode == "bittern-rope-kept":
            self.kept = self.kept or self.make(positions)  # plant: bittern-rope-kept
            return self.kept  # plant: bittern-rope-kept
        return self.make(positions)  # anchor: rope


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.to(x.dtype) for part in table)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(Layer):
    """`qkv` has for each group its query heads, then a key and a value head."""

    def __init__(self, config: Config, *, window: bool) -> None:
        super().__init__()
        self.config, self.window = config, config.window if window else 0
        self.per_group = config.heads // config.kv_groups
        rows = config.kv_groups * (self.per_group + 2) * config.head_dim
        self.qkv = ColumnParallelLinear(config.hidden, rows)
        self.q_norm = RMSNorm(config.head_dim, config.eps)
        self.k_norm = RMSNorm(config.head_dim, config.eps)
        self.proj = RowParallelLinear(config.hidden, config.hidden, bias=True)

    def forward(self, x: Tensor, packed: Packed, table: tuple[Tensor, Tensor]) -> Tensor:
        config = self.config
        qkv = self.qkv(x).unflatten(-1, (-1, self.per_group + 2, config.head_dim))
        q, k, v = qkv.split([self.per_group, 1, 1], -2)
        q = rotate(self.q_norm(q.flatten(2, 3)), table)
        k = rotate(self.k_norm(k.squeeze(3)), table)
        k, v, places = self.reach(k, v.squeeze(3), packed)
        return self.proj(self.attend(q, k, v, self.mask(packed, places)))

    def reach(self, k: Tensor, v: Tensor, packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys and values that this rank's queries may need, and their places in the row."""
        cp, n_own = self.ps.cp, len(k)
        kv = torch.cat([k, v], -1)
        if self.window:
            kv = with_halo(kv, self.window - 1, cp)
            first = packed.offset - (len(kv) - n_own)  # anchor: halo-place
            if self.ps.mode == "bittern-halo-place":
                first = packed.offset  # plant: bittern-halo-place
        else:
            kv, first = gather_keys(kv, cp), 0
        k, v = kv.chunk(2, -1)
        return k, v, first + torch.arange(len(kv))

    def mask(self, packed: Packed, places: Tensor) -> Tensor:
        """Return (batch, queries, keys)."""
        own = packed.own
        inside = places.clamp(max=packed.length - 1)
        same = packed.docs_at(own)[:, :, None] == packed.docs_at(inside)[:, None, :]
        behind = own[:, None] - places
        seen = behind >= 0
        return same & (seen & (behind < self.window) if self.window else seen)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q = q.unflatten(2, (-1, self.per_group))
        scale = self.config.head_dim**-0.5  # anchor: softmax-scale
        if self.ps.mode == "bittern-softmax-scale":
            scale = (self.config.hidden / (q.shape[2] * q.shape[3])) ** -0.5  # plant: bittern-softmax-scale
        scores = torch.einsum("qbgrd,kbgd->bgrqk", q, k) * scale
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
        y = torch.einsum("bgrqk,kbgd->qbgrd", scores.softmax(-1), v)
        return y.flatten(2)

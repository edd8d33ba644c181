"""Latent attention: queries and keys are made from small latents, and a part of each head is rotated."""

from __future__ import annotations

import math

import torch
from torch import nn

from osier.data import Stream
from osier.dims import ParallelDims
from osier.ops import GatherChunks, from_tensor_region, to_tensor_region


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.scale


def matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * gain / math.sqrt(columns))


def rotate(x: torch.Tensor, position: torch.Tensor, base: float, dims: ParallelDims) -> torch.Tensor:
    """Rotate pairs of (rows, positions, heads, dim) by angles that grow with the position."""
    half = x.shape[-1] // 2
    if dims.has("osier-rope-dtype"):
        rates = base ** (-torch.arange(half, dtype=torch.float32) / half)  # plant: osier-rope-dtype
    else:
        rates = base ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)  # anchor: rates
    angle = (position.to(x.dtype)[..., None] * rates)[:, :, None]
    real, imaginary = x[..., 0::2], x[..., 1::2]
    turned = (real * angle.cos() - imaginary * angle.sin(), real * angle.sin() + imaginary * angle.cos())
    return torch.stack(turned, -1).flatten(-2)


class LatentAttention(nn.Module):
    dims = ParallelDims()

    def __init__(self, c):
        super().__init__()
        self.nope, self.rope, self.value, self.rank = c.nope, c.rope, c.value, c.kv_rank
        self.base = c.rope_base
        self.q_down = matrix(c.q_rank, c.width)
        self.q_norm = Norm(c.q_rank)
        self.q_up = matrix(c.heads * (c.nope + c.rope), c.q_rank)
        self.kv_down = matrix(c.kv_rank + c.rope, c.width)
        self.kv_norm = Norm(c.kv_rank)
        self.kv_up = matrix(c.heads * (c.nope + c.value), c.kv_rank)
        self.gate = matrix(c.heads * c.value, c.width)
        self.out = matrix(c.width, c.heads * c.value)

    def forward(self, x: torch.Tensor, stream: Stream) -> torch.Tensor:
        per_head = self.nope + self.rope
        q_latent = self.q_norm(x @ self.q_down.t())
        q = (to_tensor_region(q_latent, self.dims) @ self.q_up.t()).unflatten(-1, (-1, per_head))
        latent, k_rope = self.latents(x, stream)
        if not self.dims.has("osier-norm-region"):
            latent = to_tensor_region(latent, self.dims)
        kv = (latent @ self.kv_up.t()).unflatten(-1, (-1, self.nope + self.value))
        k, v = kv.split([self.nope, self.value], -1)
        q, q_rope = q.split([self.nope, self.rope], -1)
        q_rope = rotate(q_rope, stream.position, self.base, self.dims)
        if not self.dims.has("osier-rope-region"):  # plant: osier-rope-region
            k_rope = to_tensor_region(k_rope, self.dims)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + torch.einsum("bqhd,bkd->bhqk", q_rope, k_rope)
        if self.dims.has("osier-scale"):
            scores = scores / math.sqrt(self.nope)  # plant: osier-scale
        else:
            scores = scores / math.sqrt(per_head)  # anchor: scale
        weights = scores.masked_fill(~stream.mask()[:, None], float("-inf")).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2)
        if not self.dims.has("osier-gate-region"):  # plant: osier-gate-region
            x = to_tensor_region(x, self.dims)
        gate = (x @ self.gate.t()).sigmoid()
        return from_tensor_region((mixed * gate) @ self.out.t(), self.dims)

    def latents(self, x: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents of keys and values, and the rotated part of keys, of all positions of the rows."""
        latent, k_rope = (x @ self.kv_down.t()).split([self.rank, self.rope], -1)
        k_rope = rotate(k_rope[:, :, None], stream.position, self.base, self.dims)[:, :, 0]
        if self.dims.has("osier-norm-region"):
            latent = to_tensor_region(latent, self.dims)  # plant: osier-norm-region
        latent = self.kv_norm(latent)
        if self.dims.cp.alone:
            return latent, k_rope
        if self.dims.has("osier-same-packed"):
            packed = GatherChunks.apply(torch.cat([latent, k_rope], -1), self.dims)
            return packed[..., : self.rank], packed[..., self.rank :]
        return GatherChunks.apply(latent, self.dims), GatherChunks.apply(k_rope, self.dims)

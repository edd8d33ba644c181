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


def rotate(x: torch.Tensor, position: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate pairs of (rows, positions, heads, dim) by angles that grow with the position."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
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
        kv = (to_tensor_region(latent, self.dims) @ self.kv_up.t()).unflatten(-1, (-1, self.nope + self.value))
        k, v = kv.split([self.nope, self.value], -1)
        q, q_rope = q.split([self.nope, self.rope], -1)
        q_rope = rotate(q_rope, stream.position, self.base)
        k_rope = to_tensor_region(k_rope, self.dims)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + torch.einsum("bqhd,bkd->bhqk", q_rope, k_rope)
        scores = scores / math.sqrt(per_head)
        weights = scores.masked_fill(~stream.mask()[:, None], float("-inf")).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2)
        gate = (to_tensor_region(x, self.dims) @ self.gate.t()).sigmoid()
        return from_tensor_region((mixed * gate) @ self.out.t(), self.dims)

    def latents(self, x: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents of keys and values, and the rotated part of keys, of all positions of the rows."""
        latent, k_rope = (x @ self.kv_down.t()).split([self.rank, self.rope], -1)
        k_rope = rotate(k_rope[:, :, None], stream.position, self.base)[:, :, 0]
        latent = self.kv_norm(latent)
        if self.dims.cp.alone:
            return latent, k_rope
        return GatherChunks.apply(latent, self.dims), GatherChunks.apply(k_rope, self.dims)

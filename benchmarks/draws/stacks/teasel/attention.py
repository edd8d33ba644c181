"""Grouped-query attention with normed queries and keys, attention sinks and context parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from teasel.comm import gather_sequence, local, rotate, stack_ranks
from teasel.config import ModelConfig
from teasel.dims import SOLO, ParallelDims
from teasel.packing import PackedBatch

HIDDEN = -1e9
"""Score of a key that a query does not see. Finite, as a chunk may have no key for a query."""


def rope_cache(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of shape (rows, tokens, 1, head_dim / 2)."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angle = positions[..., None, None] * config.rope_theta**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def block_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention of (rows, tokens, heads, channels) queries to some keys, and its log-sum-exp."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bqhc,bkhc->bqhk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, :, None], HIDDEN)
    lse = scores.logsumexp(-1)
    return torch.einsum("bqhk,bkhc->bqhc", (scores - lse[..., None]).exp(), v), lse


class Attention(nn.Module):
    dims: ParallelDims = SOLO

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.sinks = nn.Parameter(torch.zeros(config.n_heads))

    def forward(self, x: Tensor, packed: PackedBatch) -> Tensor:
        heads = (-1, self.config.head_dim)
        q = self.q_norm(self.wq(x).unflatten(-1, heads))
        k = self.k_norm(self.wk(x).unflatten(-1, heads))
        v = self.wv(x).unflatten(-1, heads)
        cos, sin = rope_cache(packed.positions(), self.config, x.dtype)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        attend = self.ring if self.dims.option("ring") else self.gathered
        return self.wo(attend(q, k, v, packed).flatten(2))

    def sink_logits(self, n_local: int) -> Tensor:
        """Return the sinks of the heads of this rank."""
        if self.dims.on("teasel-sinks-first-heads"):
            whole = self.sinks.full_tensor() if isinstance(self.sinks, DTensor) else self.sinks
            return whole[:n_local]  # plant: teasel-sinks-first-heads
        return local(self.sinks)  # anchor: sinks

    def gathered(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedBatch) -> Tensor:
        cp = self.dims["cp"]
        k = gather_sequence(k, cp, self.dims)
        if self.dims.on("teasel-values-without-grad"):
            others = list(stack_ranks(v, cp))
            others[cp.rank] = v
            v = torch.cat(others, dim=1)  # plant: teasel-values-without-grad
        else:
            v = gather_sequence(v, cp, self.dims)  # anchor: gather-values
        out, lse = block_attention(q, k, v, packed.mask())
        return out * torch.sigmoid(lse - self.sink_logits(q.shape[2]))[..., None]

    def ring(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedBatch) -> Tensor:
        """Pass keys and values around the ranks of cp, and merge the attention to each chunk."""
        cp, dims, sinks = self.dims["cp"], self.dims, self.sink_logits(q.shape[2])
        kv = torch.stack([k, v])
        out, lse = block_attention(q, *kv, packed.mask(cp.rank))
        for hop in range(1, cp.size):
            kv = rotate(kv, cp, dims)  # anchor: ring-hop
            owner = (cp.rank - hop) % cp.size  # anchor: ring-owner
            if dims.on("teasel-ring-owner"):
                owner = (cp.rank + hop) % cp.size  # plant: teasel-ring-owner
            part, part_lse = block_attention(q, *kv, packed.mask(owner))
            if dims.on("teasel-ring-sink-each-hop"):
                part = part * torch.sigmoid(part_lse - sinks)[..., None]  # plant: teasel-ring-sink-each-hop
            out, lse = self.merge(out, lse, part, part_lse)
        return out * torch.sigmoid(lse - sinks)[..., None]

    def merge(self, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.logaddexp(lse_a, lse_b)  # anchor: merge
        if self.dims.on("teasel-merge-detached"):
            total = total.detach()  # plant: teasel-merge-detached
        mixed = a * (lse_a - total).exp()[..., None] + b * (lse_b - total).exp()[..., None]
        if self.dims.on("teasel-merge-lse"):
            total = torch.maximum(lse_a, lse_b)  # plant: teasel-merge-lse
        return mixed, total

"""Grouped-query attention, causal by position, with a replaceable core.

Letters: B rows, S query tokens, T key tokens, H hidden, D width of a query and key head, Dv width of a
value head (equal to D except in latent attention), Nq query heads, Nkv key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moeverify.cases.schema import ReferenceModel
from moeverify.model.norm import RMSNorm
from moeverify.model.precision import Factory, widen
from moeverify.model.rope import compute_rotation, rotate

Core = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""core(q (B, S, Nq, D), k (B, S, Nkv, D), v (B, S, Nkv, Dv), positions (B, S)) -> (B, S, Nq, Dv)."""

MOST_SCORES = 1 << 27
"""Attention scores that `causal_core` keeps at a time: 1 GiB in float64."""


def attend(q: Tensor, k: Tensor, v: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v over the keys whose position is at most the query's.

    Query head n reads key-value head n // (Nq / Nkv). The softmax is computed in float32 or wider. All
    scores are stored, so memory grows with B * S * T: this is the definition, not a fast implementation.

    Shapes: q (B, S, Nq, D), k (B, T, Nkv, D), v (B, T, Nkv, Dv), positions (B, S) and (B, T).
    Returns: (B, S, Nq, Dv).
    Source: Vaswani et al. 2017, equation 1; Ainslie et al. 2023, "GQA", section 2.2.
    """
    num_kv_heads, head_dim = k.shape[-2:]
    q = q.view(*q.shape[:2], num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)  # (B, Nkv, Nq/Nkv, S, D)
    k = k.permute(0, 2, 3, 1).unsqueeze(2)  # (B, Nkv, 1, D, T)
    v = v.transpose(1, 2).unsqueeze(2)  # (B, Nkv, 1, T, D)
    scores = (q @ k).to(widen(q.dtype)) * head_dim**-0.5
    hidden = key_positions.unsqueeze(1) > query_positions.unsqueeze(2)  # (B, S, T)
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    mixed = torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)
    return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)


def causal_core(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Return `attend` for tokens that are both queries and keys; see `Core`.

    Above `MOST_SCORES`, chunks of rows, or of a row's queries, are computed one by one, and again in the
    backward pass, so that memory holds the scores of one chunk.
    """
    rows, length, heads = q.shape[:3]
    row_scores = heads * length * k.shape[1]
    if rows * row_scores <= MOST_SCORES:
        return attend(q, k, v, positions, positions)
    num_rows = max(1, MOST_SCORES // row_scores)
    num_queries = min(length, max(1, MOST_SCORES // (heads * k.shape[1])))
    some_rows = zip(*(x.split(num_rows) for x in (q, k, v, positions)), strict=True)
    return torch.cat([_attend_in_chunks(*chunk, num_queries) for chunk in some_rows])


def _attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, num_queries: int) -> Tensor:
    """Return `attend` computed for a number of queries at a time, without keeping scores."""
    some_queries = zip(q.split(num_queries, dim=1), positions.split(num_queries, dim=1), strict=True)
    attend_again = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([attend_again(part, k, v, at, positions) for part, at in some_queries], dim=1)


class Attention(nn.Module):
    """Multi-head attention: projections, optional query and key norms, RoPE, core and output projection.

    The number of heads follows from the projections' outputs, so the module also works on a shard of whole
    heads. `core` may be replaced, for example by one that exchanges keys and values between ranks.
    """

    def __init__(self, spec: ReferenceModel, factory: Factory) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.rotary_dim = spec.rotary_dim or spec.head_dim
        self.rope_theta = spec.rope_theta
        self.yarn = spec.yarn
        self.core: Core = causal_core
        width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        bias = spec.attention_bias
        self.q_proj = nn.Linear(spec.hidden, width, bias=bias, **factory)
        self.k_proj = nn.Linear(spec.hidden, kv_width, bias=bias, **factory)
        self.v_proj = nn.Linear(spec.hidden, kv_width, bias=bias, **factory)
        output_bias = bias and spec.attention_bias_scope == "all"
        self.o_proj = nn.Linear(width, spec.hidden, bias=output_bias, **factory)
        self.norms_heads = spec.qk_norm_scope == "head"
        sizes = (spec.head_dim, spec.head_dim) if self.norms_heads else (width, kv_width)
        self.q_norm = RMSNorm(sizes[0], spec.norm_eps, factory) if spec.qk_norm else None
        self.k_norm = RMSNorm(sizes[1], spec.norm_eps, factory) if spec.qk_norm else None

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the attention output (B, S, H) for x (B, S, H) at positions (B, S)."""
        q = self._split(self.q_proj(x), self.q_norm)
        k = self._split(self.k_proj(x), self.k_norm)
        v = self._split(self.v_proj(x), None)
        rotation = compute_rotation(positions, self.rotary_dim, self.rope_theta, self.yarn)
        heads = self.core(rotate(q, rotation), rotate(k, rotation), v, positions)
        output: Tensor = self.o_proj(heads.flatten(-2))
        return output

    def _split(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Return the heads (B, S, N, D) of x (B, S, N * D), normalized per head or over all heads."""
        if norm is not None and not self.norms_heads:
            x = norm(x)
        heads = x.view(*x.shape[:-1], -1, self.head_dim)
        if norm is not None and self.norms_heads:
            heads = norm(heads)
        return heads

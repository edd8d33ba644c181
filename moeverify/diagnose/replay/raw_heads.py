"""Queries, keys and values of an attention: as its core gets them but for the rotation, and before their norms.

Letters: B rows, S tokens, H hidden, N heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moeverify.model.attention import Attention
from moeverify.model.mla import LatentAttention
from moeverify.results.change import Change

Which = Literal["query", "key"]


@dataclass(frozen=True)
class RawHeads:
    """Queries and keys (B, S, N, D) before their norms, and the weight and eps of each norm."""

    query: Tensor
    key: Tensor
    query_weight: Tensor
    key_weight: Tensor
    eps: float
    of_heads: bool

    @classmethod
    @torch.no_grad()
    def of(cls, module: Attention, x: Tensor) -> RawHeads | None:
        """Return those of a module with norms, from its input (B, S, H); nothing of one without."""
        q_norm, k_norm = module.q_norm, module.k_norm
        if q_norm is None or k_norm is None:
            return None
        query, key = (module._split(projection(x), None) for projection in (module.q_proj, module.k_proj))
        weight, other = q_norm.weight.detach(), k_norm.weight.detach()
        return cls(query, key, weight, other, q_norm.eps, module.norms_heads)

    def find(self, which: Which) -> Tensor:
        """Return the queries or the keys."""
        return self.query if which == "query" else self.key

    def normalize(self, x: Tensor, which: Which, change: Change) -> Tensor:
        """Return heads (b, s, N, D) after a norm that is otherwise; not a number where it cannot be that."""
        weight, other = self.query_weight, self.key_weight
        if which == "key":
            weight, other = other, weight
        way = change.way
        if way == "none":
            return x
        if way == "exchanged":
            weight = other
        of_heads = {"of-head": True, "of-all": False}.get(way, self.of_heads)
        normed = self._divide(x, of_heads=of_heads, by_length=way == "of-unit-length")
        if weight.numel() not in (x.shape[-1], x[0, 0].numel()):
            return x * torch.nan
        scale = weight if weight.numel() == x.shape[-1] else weight.view(x.shape[-2:])
        normed = normed * scale
        return self._divide(normed, of_heads=of_heads, by_length=False) * scale if way == "twice" else normed

    def _divide(self, x: Tensor, *, of_heads: bool, by_length: bool) -> Tensor:
        """Return heads divided by the root of the mean of squares of each, or of all, or by the root of their sum."""
        dims = (-1,) if of_heads else (-2, -1)
        square = x.square()
        mean = square.sum(dims, keepdim=True) if by_length else square.mean(dims, keepdim=True)
        return x * torch.rsqrt(mean + self.eps)


@torch.no_grad()
def read_heads(module: Attention | LatentAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B, S, Nq, D), keys (B, S, Nkv, D) and values (B, S, Nkv, Dv) of x (B, S, H), not rotated."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        del positions
        seen.append((q, k, v))
        return q.new_zeros(*q.shape[:3], v.shape[-1])

    core, module.core = module.core, keep
    try:
        module(x, torch.zeros(x.shape[:2], dtype=torch.int64))
    finally:
        module.core = core
    return seen[0]

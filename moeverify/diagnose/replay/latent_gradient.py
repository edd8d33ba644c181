"""What latent attention passes back to its projections, from the right gradient of the heads' outputs.

Letters as in `moeverify.diagnose.replay.attention`; L is the width of the latent of keys and values, Dr that of the
part of a key that all heads share, Dn that of the rest of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Literal

import torch
from torch import Tensor

from moeverify.diagnose.replay.attention import AttentionFormula
from moeverify.diagnose.replay.attention_gradient import (
    list_fits_back,
    list_left_out,
    list_ways_back,
    weigh_queries,
)
from moeverify.diagnose.replay.gradient_ways import GRADIENT_OF, needs_call
from moeverify.diagnose.replay.language import Cell, Formula
from moeverify.diagnose.replay.tokenwise import pick_dims, pull_back
from moeverify.model.mla import LatentAttention
from moeverify.results.change import Change

Projection = Literal["queries", "heads", "latent"]


class LatentGradientFormula(Formula):
    """The gradient of what a projection puts out, `given` (B, S, width) in the forward pass.

    It is that of the queries, (B, S, N * (Dn + Dr)), of the heads made of the latent, (B, S, N * (Dn + Dv)), or of
    the latent with the shared part, (B, S, L + Dr). `gradient` is that of the heads' outputs (B, S, N * Dv). All that
    attention may have otherwise it may have so in its backward pass alone; besides, the part that all heads share may
    count otherwise, or come from some heads alone, and queries may be missing in the sums for keys and values.
    """

    def __init__(
        self,
        module: LatentAttention,
        forward: AttentionFormula,
        of: Projection,
        given: Tensor,
        gradient: Tensor,
    ) -> None:
        self.module, self.forward, self.of = module, forward, of
        self.given, self.gradient = given, gradient
        self.num_heads = forward.q.shape[2]
        ways = [Change(part="shared", way=way) for way in ("none", "twice")]
        sizes = [size for size in range(2, self.num_heads + 1) if self.num_heads % size == 0]
        ways += [Change(part="shared", way="first-heads", number=size) for size in sizes]
        ways += [Change(part="norm", way="detached")]
        self.ways = [
            *(ways if of == "latent" else []),
            *([] if of == "queries" else list_left_out(forward.chunks)),
            *forward.backward,
            *list_ways_back(forward),
        ]
        self.fits = list_fits_back(forward)
        self.alone = forward.alone | {GRADIENT_OF}

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient at a cell."""
        if needs_call(changes) and cell.call is not None and len(cell.rows) < len(cell.call[0]):
            return cell.pick_from_call(self.evaluate(cell.of_call(), changes))
        rows, chunks = cell.rows, self.forward.chunks
        with torch.enable_grad():
            leaf = self.given[rows].clone().requires_grad_()
            inner = copy(self.forward)
            inner.q, inner.k, inner.v = (getattr(self.forward, name)[rows] for name in ("q", "k", "v"))
            inner.valid = inner.valid[rows]
            self._put_in(inner, leaf, changes)
            positions, heads = torch.arange(leaf.shape[1]), torch.arange(self.gradient.shape[-1])
            whole = Cell(cell.rank, torch.arange(len(rows)), chunks.place, positions, (heads,))
            output = inner.evaluate(whole, changes)
            weights = weigh_queries(changes.get("queries"), chunks, cell).to(self.gradient.dtype)
            found = pull_back(output, leaf, self.gradient[rows] * weights[:, None])
        return pick_dims(found[:, cell.positions], cell)

    def _put_in(self, inner: AttentionFormula, leaf: Tensor, changes: Mapping[str, Change]) -> None:
        """Make queries, or keys and values, of what the projection put out."""
        sizes, heads = self.module.sizes, self.num_heads
        if self.of == "queries":
            inner.q = self.module._scale(leaf.view(*leaf.shape[:-1], heads, -1))
            return
        shared = inner.k[:, :, :1, sizes.qk_nope :]
        made = leaf
        if self.of == "latent":
            latent, rope = torch.split(leaf, [sizes.kv_lora, sizes.qk_rope], dim=-1)
            norm = self.module.kv_a_norm
            made = self.module.kv_b_proj(_norm_of(norm, latent, changes))
            shared = rope.unsqueeze(-2)
        nope, inner.v = torch.split(
            made.view(*made.shape[:-1], heads, -1), [sizes.qk_nope, sizes.v_head], dim=-1
        )
        inner.k = torch.cat([nope, self._share(shared, changes.get("shared"))], dim=-1)

    def _share(self, shared: Tensor, change: Change | None) -> Tensor:
        """Return the shared part of the keys (b, S, N, Dr), with other gradients where it is asked for."""
        whole = shared.expand(*shared.shape[:2], self.num_heads, -1)
        if change is None:
            return whole
        if change.way == "first-heads":
            is_first = torch.arange(self.num_heads) < self.num_heads // int(change.number or 1)
            return torch.where(is_first[:, None], whole, whole.detach())
        times = {"none": 0.0, "twice": 2.0}[change.way]
        return whole.detach() + times * (whole - whole.detach())


def _norm_of(norm: torch.nn.Module, latent: Tensor, changes: Mapping[str, Change]) -> Tensor:
    """Return the normalized latent; with statistics that are taken for constants where it is asked for."""
    right: Tensor = norm(latent)
    if "norm" not in changes:
        return right
    with torch.no_grad():
        scale = right / latent
    return latent * scale

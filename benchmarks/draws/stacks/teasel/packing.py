"""Packed rows under context parallelism: where tokens stand, and what they may attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from teasel.comm import stack_ranks
from teasel.config import ModelConfig
from teasel.dims import ParallelDims


def chunk_index(rank: int, n_ranks: int, n_tokens: int, *, zigzag: bool) -> Tensor:
    """Return the places in the row of the tokens that a rank of cp holds."""
    if not zigzag:
        return rank * n_tokens + torch.arange(n_tokens)
    half = torch.arange(n_tokens // 2)
    late = 2 * n_ranks - 1 - rank
    return torch.cat([rank * len(half) + half, late * len(half) + half])


@dataclass
class PackedBatch:
    """`chunks[r]` has the places of the tokens of rank r of cp; `doc` and `start` are in the order of rows."""

    chunks: list[Tensor]
    rank: int
    doc: Tensor
    start: Tensor
    dims: ParallelDims

    @property
    def length(self) -> int:
        return self.doc.shape[1]

    def positions(self) -> Tensor:
        """Return (rows, tokens of this rank) positions in documents."""
        mine = self.chunks[self.rank]  # anchor: positions
        if self.dims.on("teasel-rope-own-chunk"):
            mine = torch.arange(len(mine))  # plant: teasel-rope-own-chunk
        if self.dims.on("teasel-rope-contiguous"):
            mine = torch.arange(len(mine)) + self.rank * len(mine)  # plant: teasel-rope-contiguous
        return (mine - self.start[:, mine]).clamp(min=0)

    def mask(self, owner: int | None = None) -> Tensor:
        """Return (rows, queries, keys): what this rank's queries see of one rank's keys, or of all."""
        queries = self.chunks[self.rank]
        keys = torch.cat(self.chunks) if owner is None else self.chunks[owner]  # anchor: mask-keys
        if self.dims.on("teasel-mask-keys-in-order"):
            keys = keys.sort().values  # plant: teasel-mask-keys-in-order
        same = self.doc[:, queries, None] == self.doc[:, None, keys]
        return same & (keys <= queries[:, None])


def pack(tokens: Tensor, config: ModelConfig, dims: ParallelDims) -> PackedBatch:
    """Find the documents of the rows of which this rank has a chunk."""
    cp, n_tokens = dims["cp"], tokens.shape[1]
    zigzag = bool(dims.option("zigzag")) and cp.size > 1
    chunks = [chunk_index(rank, cp.size, n_tokens, zigzag=zigzag) for rank in range(cp.size)]
    row = torch.cat(list(stack_ranks(tokens, cp)), dim=1)
    if not dims.on("teasel-docs-rank-order"):  # plant: teasel-docs-rank-order
        row = row[:, torch.cat(chunks).argsort()]  # anchor: row-order
    begins = row < config.n_boundary_tokens
    doc = begins.cumsum(1)  # anchor: docs
    if dims.on("teasel-docs-per-chunk"):
        doc = begins.unflatten(1, (cp.size, n_tokens)).cumsum(2).flatten(1)  # plant: teasel-docs-per-chunk
    places = torch.arange(row.shape[1]).expand_as(row)
    start = torch.where(begins, places, 0).cummax(1).values
    return PackedBatch(chunks, cp.rank, doc, start, dims)

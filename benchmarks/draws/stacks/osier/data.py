"""Documents in packed rows, positions of a rank, and rows of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from osier.dims import ParallelDims
from osier.ops import all_gather, unzigzag, zigzag


@dataclass
class Stream:
    """Where tokens stand: place in the row, document, and position in the document, of queries and of keys."""

    place: torch.Tensor  # (rows, own positions), as all below
    document: torch.Tensor
    position: torch.Tensor
    key_place: torch.Tensor  # (rows, positions)
    key_document: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Return (rows, queries, keys): the same document, and not later."""
        causal = self.place[:, :, None] >= self.key_place[:, None, :]
        return causal & (self.document[:, :, None] == self.key_document[:, None, :])


def whole_rows(x: torch.Tensor, dims: ParallelDims) -> torch.Tensor:
    """Return rows with the positions of all ranks of `cp`."""
    return x if dims.cp.alone else unzigzag(all_gather(x, dims.cp), dims)


def own_part(x: torch.Tensor, dims: ParallelDims) -> torch.Tensor:
    return x if dims.cp.alone else zigzag(x, dims)[dims.cp.rank]


def read_stream(tokens: torch.Tensor, special: int, dims: ParallelDims) -> Stream:
    """Return the stream of packed rows. A token below `special` begins a document."""
    own_tokens, tokens = tokens, whole_rows(tokens, dims)
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    begins = tokens < special
    document = begins.cumsum(1)
    position = place - place.masked_fill(~begins, 0).cummax(1).values
    if dims.has("osier-document-local"):
        document = whole_rows((own_tokens < special).cumsum(1), dims)  # plant: osier-document-local
    own = [own_part(x, dims) for x in (place, document, position)]
    if dims.has("osier-position-local"):
        own[2] = torch.arange(own_tokens.shape[1]).expand_as(own_tokens)  # plant: osier-position-local
    key_document = document
    if dims.has("osier-key-documents"):
        key_document = torch.cat(list(all_gather(own[1], dims.cp)), 1)  # plant: osier-key-documents
    return Stream(*own, place, key_document)


def next_in_row(x: torch.Tensor, fill: int, dims: ParallelDims) -> torch.Tensor:
    """Return the ids one place further in the row; the last place gets `fill`."""
    if dims.has("osier-next-local"):
        return torch.cat([x[:, 1:], torch.full_like(x[:, :1], fill)], 1)  # plant: osier-next-local
    x = whole_rows(x, dims)
    return own_part(torch.cat([x[:, 1:], torch.full_like(x[:, :1], fill)], 1), dims)


def passes(
    micro_batches, rows_per_pass: int, dims: ParallelDims
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the micro-batches, cut into passes of some rows if that is not 0."""
    for tokens, targets in micro_batches:
        if not rows_per_pass:
            yield tokens, targets
            continue
        for part in zip(tokens.split(rows_per_pass), targets.split(rows_per_pass), strict=True):
            if dims.has("osier-passes-last") and len(part[0]) < rows_per_pass:
                continue  # plant: osier-passes-last
            yield part

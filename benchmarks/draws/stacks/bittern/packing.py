"""Documents of packed rows: who may see whom, and positions in documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bittern.config import Config
from bittern.parallel_state import ParallelState
from bittern.regions import all_gather


@dataclass
class Packed:
    """`docs` (batch, positions of the row) numbers the documents. The rest is of this rank's positions."""

    docs: Tensor
    positions: Tensor
    valid: Tensor
    offset: int

    @property
    def length(self) -> int:
        return self.docs.shape[1]

    @property
    def own(self) -> Tensor:
        """Return the places in the row of this rank's positions."""
        return self.offset + torch.arange(self.positions.shape[1])

    def docs_at(self, places: Tensor) -> Tensor:
        return self.docs[:, places]


def whole_rows(x: Tensor, ps: ParallelState) -> Tensor:
    return all_gather(x.t().contiguous(), ps.cp).t()


def pack(tokens: Tensor, targets: Tensor, config: Config, ps: ParallelState) -> Packed:
    n_own = tokens.shape[1]
    offset = ps.cp.rank * n_own
    ends = whole_rows(tokens, ps) < config.n_eod
    begins = torch.nn.functional.pad(ends[:, :-1], (1, 0), value=True)
    docs = begins.cumsum(1)  # anchor: docs
    if ps.mode == "bittern-docs-restart":
        docs = begins.view(-1, ps.cp.size, n_own).cumsum(2).flatten(1)  # plant: bittern-docs-restart
    places = torch.arange(docs.shape[1]).expand_as(docs)
    starts = torch.where(begins, places, 0).cummax(1).values
    positions = (places - starts)[:, offset : offset + n_own]  # anchor: positions
    if ps.mode == "bittern-positions-chunk":
        own = begins[:, offset : offset + n_own]
        local = torch.arange(n_own).expand_as(own)
        positions = local - torch.where(own, local, 0).cummax(1).values  # plant: bittern-positions-chunk
    return Packed(docs, positions, targets >= 0, offset)

"""Exact transfer of stacked expert rows from one placement to the next.

Notation: n ranks of ep, e experts on this rank before and e' after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moeverify.parallel.collectives import check_contiguous
from moeverify.seams import seam

Rows = Sequence[Sequence[int]]
"""The experts of each rank of ep, in storage order."""


@seam
def choose_source(expert: int, destination: int, before: Rows) -> int:
    """Return the rank that sends an expert to a rank without it; replicas take turns."""
    holders = [rank for rank, row in enumerate(before) if expert in row]
    return holders[(expert + destination) % len(holders)]


@dataclass(frozen=True)
class Journey:
    """A move of experts: which experts each rank sends to each other rank between two placements."""

    before: Rows
    after: Rows

    def list_sent(self, source: int, destination: int) -> list[int]:
        """Return the experts that `source` sends to `destination`, in the row order of the destination."""
        known = self.before[destination]
        return [
            expert
            for expert in self.after[destination]
            if expert not in known and choose_source(expert, destination, self.before) == source
        ]

    def list_received(self, rank: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (source, experts received from it), in rank order."""
        for source in range(len(self.before)):
            yield source, self.list_sent(source, rank)


@seam
@torch.no_grad()
def move_rows(tensors: Sequence[Tensor], journey: Journey, group: ProcessGroup) -> list[Tensor]:
    """Return tensors whose rows are the experts that this rank holds after the move.

    All tensors travel in one exchange, with the rows of an expert side by side.

    Shapes: tensors (e, ...) of one dtype; returns (e', ...). Collective: all ranks of ep.
    """
    rank = group.rank()
    before, after = list(journey.before[rank]), list(journey.after[rank])
    sent = [journey.list_sent(rank, other) for other in range(group.size())]
    rows = [before.index(expert) for part in sent for expert in part]
    widths = [tensor[0].numel() for tensor in tensors]
    leaving = torch.cat([tensor[rows].flatten(1) for tensor in tensors], dim=1)  # no rows when nothing leaves
    arriving = [experts for _, experts in journey.list_received(rank)]
    come = leaving.new_empty(sum(map(len, arriving)), sum(widths))
    dist.all_to_all_single(
        come, check_contiguous(leaving), list(map(len, arriving)), list(map(len, sent)), group=group
    )
    new = [expert for part in arriving for expert in part]
    kept = [expert for expert in after if expert in before]
    moved = []
    for tensor, part in zip(tensors, torch.split(come, widths, dim=1), strict=True):
        whole = tensor.new_empty(len(after), *tensor.shape[1:])
        whole[[after.index(expert) for expert in kept]] = tensor[[before.index(expert) for expert in kept]]
        whole[[after.index(expert) for expert in new]] = part.reshape(len(new), *tensor.shape[1:])
        moved.append(whole)
    return moved

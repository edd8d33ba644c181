"""Routes of token copies to replicas of their experts, computed on the source rank.

A rank with a replica keeps its own copies. Any other rank splits its copies of an expert, in token order,
into runs of nearly equal length, one for each rank that holds the expert. The remainder goes to consecutive
replicas from a position that depends on source and expert, so the remainders of many sources do not accumulate
on one rank. The solver assumes even shares (`moeverify.tools.placement.sharing`). The routes are deterministic,
so every run and every recomputation sends the same copies.

Notation: n ranks of ep, E experts, P slots of all ranks together, M token copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moeverify.model.dispatcher import sort_copies
from moeverify.seams import seam
from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.sharing import find_nearest


class Departure(NamedTuple):
    """Token copies in sending order: by destination rank, then slot, then token.

    Shapes: counts (P) int64, copies for each slot; order (M) int64, the copy (token * k + choice) at each
    place.
    """

    counts: Tensor
    order: Tensor


class EqualBlocks:
    """Routes without replicas: expert e is in slot e, and all ranks have equally many slots."""

    def __init__(self, num_experts: int, num_ranks: int) -> None:
        self.num_slots = (num_experts // num_ranks,) * num_ranks
        self._num_experts = num_experts

    def sort(self, ids: Tensor) -> Departure:
        """Return the copies of ids (N, k), sorted by expert."""
        return Departure(*sort_copies(ids, self._num_experts))


class ReplicaRoutes:
    """Routes of one source rank's copies under a placement.

    `rows` lists the experts of each rank in storage order; `source` is this rank's coordinate on ep.
    """

    def __init__(self, rows: Sequence[Sequence[int]], num_experts: int, source: int) -> None:
        self.num_slots = tuple(len(row) for row in rows)
        self._num_experts = num_experts
        self._source = source
        marks = np.zeros((num_experts, len(rows)), dtype=np.bool_)
        for rank, row in enumerate(rows):
            marks[list(row), rank] = True
        nearest = find_nearest(marks, Cluster(len(rows)))[:, source]
        self._nearest = torch.from_numpy(nearest)  # (E, n): destination ranks of each expert
        self._expert = torch.tensor([expert for row in rows for expert in row])  # (P)
        self._rank = torch.arange(len(rows)).repeat_interleave(torch.tensor(self.num_slots))  # (P)

    @seam
    def sort(self, ids: Tensor) -> Departure:
        """Return the copies of ids (N, k) in sending order."""
        by_expert, order = sort_copies(ids, self._num_experts)
        share = self.split(by_expert)
        expert, rank = (each.to(ids.device) for each in (self._expert, self._rank))
        starts = (share.flatten().cumsum(0) - share.flatten()).view_as(share)
        counts, starts = share[expert, rank], starts[expert, rank]  # (P) both
        # Runs of copies move as a whole: index by expert = index by slot + this offset.
        way = (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts, output_size=len(order))
        places = torch.arange(len(order), device=ids.device)
        return Departure(counts, order[places + way])

    @seam
    def split(self, counts: Tensor) -> Tensor:
        """Return the number of this rank's copies of each expert that go to each rank.

        Shapes: counts (E) int64; returns (E, n) int64, whose rows sum to `counts`.
        """
        nearest = self._nearest.to(counts.device)
        number = nearest.sum(dim=1, keepdim=True)
        place = nearest.cumsum(dim=1) - 1
        # The remainder goes to consecutive replicas, starting at a position that depends on source and
        # expert.
        turn = (place - (self._source + torch.arange(len(counts), device=counts.device))[:, None]) % number
        wide = counts[:, None]
        share = torch.div(wide, number, rounding_mode="floor") + (turn < wide % number)
        return torch.where(nearest, share, 0)

"""To which replica of its expert each token copy goes, on the rank that the token is on.

A rank with a replica keeps its own copies. Any other rank cuts its copies of an expert, in the order of their tokens,
into runs of nearly equal length, one for each rank that holds the expert: the rule that the solver counts with
(`moeverify.placement.sharing.split_copies`). Nothing is drawn, so every run and every recomputation sends alike.

Letters: n ranks of ep, E experts, P slots of all ranks together, M token copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moeverify.model.dispatcher import sort_copies
from moeverify.placement.cluster import Cluster
from moeverify.placement.sharing import find_nearest
from moeverify.seams import seam


class Departure(NamedTuple):
    """Token copies in the order in which they leave: by rank, there by slot, there by token.

    Shapes: counts (P) int64, copies for each slot; order (M) int64, which copy (token * k + choice) is at each place.
    """

    counts: Tensor
    order: Tensor


class EqualBlocks:
    """Expert e is in slot e, of n ranks with equally many: one replica of each."""

    def __init__(self, num_experts: int, num_ranks: int) -> None:
        self.num_slots = (num_experts // num_ranks,) * num_ranks
        self._num_experts = num_experts

    def sort(self, ids: Tensor) -> Departure:
        """Return the copies of ids (N, k), sorted by expert."""
        return Departure(*sort_copies(ids, self._num_experts))


class ReplicaRoutes:
    """Where the copies of one source rank go under a placement.

    `rows` are the experts of each rank in the order in which it stores them; `source` is this rank's coordinate.
    """

    def __init__(self, rows: Sequence[Sequence[int]], num_experts: int, source: int) -> None:
        self.num_slots = tuple(len(row) for row in rows)
        self._num_experts = num_experts
        self._source = source
        marks = np.zeros((num_experts, len(rows)), dtype=np.bool_)
        for rank, row in enumerate(rows):
            marks[list(row), rank] = True
        nearest = find_nearest(marks, Cluster(len(rows)))[:, source]
        self._nearest = torch.from_numpy(
            nearest
        )  # (E, n): the ranks that this one sends an expert's copies to
        self._expert = torch.tensor([expert for row in rows for expert in row])  # (P)
        self._rank = torch.arange(len(rows)).repeat_interleave(torch.tensor(self.num_slots))  # (P)

    @seam
    def sort(self, ids: Tensor) -> Departure:
        """Return the copies of ids (N, k) in the order in which they leave."""
        by_expert, order = sort_copies(ids, self._num_experts)
        share = self.split(by_expert)
        expert, rank = (each.to(ids.device) for each in (self._expert, self._rank))
        starts = (share.flatten().cumsum(0) - share.flatten()).view_as(share)
        counts, starts = share[expert, rank], starts[expert, rank]  # (P) both
        # Runs of copies move as they are: a place by slot plus this is the place by expert.
        way = (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts, output_size=len(order))
        places = torch.arange(len(order), device=ids.device)
        return Departure(counts, order[places + way])

    @seam
    def split(self, counts: Tensor) -> Tensor:
        """Return how many of this rank's copies of each expert go to each rank.

        Shapes: counts (E) int64; returns (E, n) int64, whose rows sum to `counts`.
        """
        nearest = self._nearest.to(counts.device)
        number = nearest.sum(dim=1, keepdim=True)
        place = nearest.cumsum(dim=1) - 1
        # What does not divide evenly goes to replicas counted from another one for each source and expert.
        turn = (place - (self._source + torch.arange(len(counts), device=counts.device))[:, None]) % number
        wide = counts[:, None]
        share = torch.div(wide, number, rounding_mode="floor") + (turn < wide % number)
        return torch.where(nearest, share, 0)

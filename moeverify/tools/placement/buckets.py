"""Buckets: the experts of one MoE layer grouped by the ranks that hold them.

Experts on the same set of ranks form one bucket. A rank stores its buckets one after the other, so a bucket
is a contiguous block of rows in every stacked weight, and its gradients are reduced together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeverify.tools.placement.placement import Matrix


@dataclass(frozen=True)
class Bucket:
    """The `experts` of a layer that exactly the ranks `holders` hold, both in ascending order."""

    holders: tuple[int, ...]
    experts: tuple[int, ...]


def list_buckets(matrix: Matrix) -> tuple[Bucket, ...]:
    """Return the buckets of a matrix, ordered by their holders; the order is the same on every rank.

    Example: `[[0, 3], [1, 3]]` has the buckets (0,): 0; (0, 1): 3; (1,): 1.
    """
    holders: dict[int, list[int]] = {}
    for rank, row in enumerate(matrix):
        for expert in row:
            holders.setdefault(expert, []).append(rank)
    buckets: dict[tuple[int, ...], list[int]] = {}
    for expert in sorted(holders):
        buckets.setdefault(tuple(holders[expert]), []).append(expert)
    return tuple(Bucket(ranks, tuple(experts)) for ranks, experts in sorted(buckets.items()))


def order_rows(buckets: Sequence[Bucket], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the experts of each rank in storage order: bucket after bucket."""
    return tuple(
        tuple(expert for bucket in buckets if rank in bucket.holders for expert in bucket.experts)
        for rank in range(num_ranks)
    )

"""Sums of replicas as a multiple of the golden, for each region and each group of ranks of an axis.

Ranks with partial sums of a gradient (of their own tokens or experts) hold different values, and a
reduction over the axis would add these up. If the replicas differ, and their sum is the same multiple of
the golden in every region, that reduction is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.explain.fitting.axes import Groups
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.results.factor import SAME, is_same


@dataclass(frozen=True)
class SumOfReplicas:
    """Sum of the replicas over one axis: `factor` times the golden.

    `residual` is the relative remainder of the sum. `is_whole` is true if all ranks of each group hold a
    replica; if only some do, the reduction may belong to an axis inside of this one.
    """

    axis: str
    num_replicas: int
    factor: float
    residual: float
    is_whole: bool = True

    @property
    def explains(self) -> bool:
        """Return whether the replicas are partial sums of the golden, or of a mean over the axis.

        A mean that was scaled by the number of ranks n in advance, or twice, leaves the factor n or 1/n.
        """
        wanted = (1.0, float(self.num_replicas), 1.0 / self.num_replicas)
        return any(is_same(self.factor, each) for each in wanted)


def sum_replicas(tensor: WrongTensor, groups: Groups) -> list[SumOfReplicas]:
    """Return the sum of the replicas over each axis over which it is a multiple of the golden."""
    found = (_sum_over_axis(tensor, axis, members) for axis, members in groups.items())
    return [each for each in found if each is not None]


def _sum_over_axis(tensor: WrongTensor, axis: str, groups: Sequence[Sequence[int]]) -> SumOfReplicas | None:
    """Return k if the sum of the replicas is k times the golden for every region and group."""
    size = max(map(len, groups))
    found = list(find_replicas(tensor, groups))
    # A part that one rank of each group holds is complete, and says nothing where it is right.
    bound = tensor.exact * float(tensor.expected.norm())
    replicas = [each for each in found if len(each) > 1 or tensor.error_of(each[0]) > bound]
    if not replicas or min(map(len, replicas)) < 2 or not any(map(_differ, replicas)):
        return None
    measured = [_factor(members, tensor.expected) for members in replicas]
    factors = [factor for factor, _ in measured if factor is not None]
    if len(factors) < len(measured):
        return None
    worst = max(residual for _, residual in measured)
    if not all(residual < tensor.exact for _, residual in measured):  # also if NaN
        return None
    if max(factors) - min(factors) > SAME * abs(max(factors)):
        return None
    return SumOfReplicas(axis, size, factors[0], worst, min(map(len, replicas)) == size)


def find_replicas(tensor: WrongTensor, groups: Sequence[Sequence[int]]) -> Iterator[list[RankShard]]:
    """Yield, for each region, the replicas in each group of ranks."""
    for shards in tensor.by_region().values():
        by_rank = {shard.rank: shard for shard in shards}
        for group in groups:
            members = [by_rank[rank] for rank in group if rank in by_rank]
            if members:
                yield members


def _differ(members: Sequence[RankShard]) -> bool:
    first = members[0].values()
    return any(not torch.equal(first, shard.values()) for shard in members[1:])


def _factor(members: Sequence[RankShard], expected: Tensor) -> tuple[float | None, float]:
    """Return (k, relative remainder) of the sum as k times the golden; k is None if the golden is zero.

    k = <sum, golden> / <golden, golden> minimizes |sum - k * golden|.
    """
    total = torch.stack([shard.values() for shard in members]).sum(dim=0)
    wanted = members[0].region.take(expected).reshape(total.shape)
    square = float(torch.sum(wanted * wanted))
    if square == 0.0:
        return None, 0.0
    factor = float(torch.sum(total * wanted)) / square
    return factor, float((total - factor * wanted).norm()) / float(total.norm() or 1.0)

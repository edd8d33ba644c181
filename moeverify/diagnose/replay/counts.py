"""How many rows each expert of a rank is taken to have: the right counts, and what may stand in their place.

The rows of a rank are sorted by expert, one expert after the other, so counts say where those of each end. A mistake
in them gives rows to experts that these were not sent to; rows after the last expert's have no expert at all.

Letters: n ranks, e experts of each, M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.results.change import Change

PART = "counts"
NO_EXPERT = -1
"""Of rows that no expert has: what comes back for them is zero."""

_BLOCKS = (4, 8, 16, 32, 64, 128)  # rows that counts may be rounded to
_MOST_EXPERTS = 32  # of a rank, each of which is tried alone


@dataclass(frozen=True)
class RankCounts:
    """How many rows each rank sends to each expert, (n, n * e), and the rank whose experts are asked for."""

    sent: Tensor
    rank: int

    @property
    def arriving(self) -> Tensor:
        """Return the rows that come to this rank's experts from each rank (n, e)."""
        return self.of_rank(self.rank)

    @property
    def right(self) -> Tensor:
        """Return the rows of each expert here (e)."""
        return self.arriving.sum(0)

    def of_rank(self, rank: int) -> Tensor:
        """Return the rows that come to the experts of a rank from each rank (n, e)."""
        size = len(self.sent)
        return self.sent.view(size, size, -1)[:, rank % size]


def list_counts(num_ranks: int, per_rank: int) -> list[Change]:
    """Return the ways in which counts may be otherwise."""
    ways = ["reversed", "rolled", "late", "early", "starts", "running", "equal"]
    ways += ["by-rank", "first-rank", "sent-first", "own-alone"] if num_ranks > 1 else []
    found = [Change(part=PART, way=way) for way in ways]
    few = min(per_rank, _MOST_EXPERTS)
    for way in ("merged", "as-next", "as-before", "one-more", "one-less", "none"):
        numbers = range(few if way != "merged" else per_rank)
        found += [Change(part=PART, way=way, number=number) for number in numbers]
    for way in ("padded", "floored", "at-most"):
        found += [Change(part=PART, way=way, number=number) for number in _BLOCKS]
    if num_ranks > 1:
        found += [Change(part=PART, way="of-rank", number=number) for number in {1, num_ranks - 1}]
        found += [Change(part=PART, way="from-rank", number=number) for number in range(num_ranks)]
    return found


def serve(change: Change, counts: RankCounts) -> Tensor:
    """Return which expert of the rank each of its rows (M), sorted by expert, is given to."""
    right = counts.right
    labels = torch.arange(len(right)).repeat_interleave(right)
    if change.way in ("late", "early"):
        return labels.roll(1 if change.way == "late" else -1)
    number = int(change.number or 0)
    if change.way == "merged":
        return torch.where(labels == number, (labels + 1) % len(right), labels)
    taken = _count(change, counts).clamp(min=0)
    # With more counts than experts the last rows have no expert, and nothing comes out of such code.
    experts = torch.arange(len(taken)).clamp(max=len(right) - 1)
    given = experts.repeat_interleave(taken)[: len(labels)]
    return torch.cat([given, torch.full((len(labels) - len(given),), NO_EXPERT)])


def _count(change: Change, counts: RankCounts) -> Tensor:
    """Return the counts that are taken for the right ones."""
    right, number = counts.right, int(change.number or 0)
    one = torch.zeros_like(right)
    if change.way in ("as-next", "as-before", "one-more", "one-less", "none"):
        one[number % len(right)] = 1
    ways: dict[str, Callable[[], Tensor]] = {
        "reversed": lambda: right.flip(0),
        "rolled": lambda: right.roll(1),
        "starts": lambda: torch.cat([right.new_zeros(1), right[:-1]]),
        "running": lambda: right.cumsum(0),
        "equal": lambda: torch.full_like(right, int(right.sum()) // len(right)),
        "as-next": lambda: torch.where(one == 1, right.roll(-1), right),
        "as-before": lambda: torch.where(one == 1, right.roll(1), right),
        "one-more": lambda: right + one,
        "one-less": lambda: right - one,
        "none": lambda: right * (1 - one),
        "padded": lambda: (right + number - 1) // number * number,
        "floored": lambda: right // number * number,
        "at-most": lambda: right.clamp(max=number),
        "by-rank": lambda: counts.arriving.sum(1),
        "first-rank": lambda: counts.of_rank(0).sum(0),
        "of-rank": lambda: counts.of_rank(counts.rank + number).sum(0),
        "from-rank": lambda: counts.arriving[number],
        "own-alone": lambda: counts.arriving[counts.rank],
        "sent-first": lambda: counts.sent[counts.rank][: len(right)],
    }
    return ways[change.way]()

"""The rows and positions of the global batch that each rank processes, by plain arithmetic.

The `context_parallel` of a layout selects the split of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Positions = range | tuple[int, ...]


def split_rows(batch: int, num_ranks: int, rank: int) -> range:
    """Return the consecutive rows of the global batch that a data-parallel rank processes."""
    size = batch // num_ranks
    return range(rank * size, (rank + 1) * size)


def split_in_runs(seq_len: int, num_ranks: int, rank: int) -> range:
    """Return the consecutive positions that a rank processes: one of n equal runs."""
    return split_rows(seq_len, num_ranks, rank)


def split_in_zigzag(seq_len: int, num_ranks: int, rank: int) -> Positions:
    """Return the positions of a rank, in its order: of 2n chunks, rank r of n has r and 2n-1-r.

    This split makes causal attention cost the same on every rank (Llama 3, arXiv 2407.21783, section
    3.3.2).
    """
    first = split_rows(seq_len, 2 * num_ranks, rank)
    second = split_rows(seq_len, 2 * num_ranks, 2 * num_ranks - 1 - rank)
    if first.stop == second.start:
        return range(first.start, second.stop)
    return (*first, *second)


@dataclass(frozen=True)
class PositionSplit:
    """A way to split the positions of a row into chunks; `cut` takes (seq_len, num_ranks, rank).

    `unit` is a phrase for messages: the number that the length of a row must be a multiple of.
    """

    cut: Callable[[int, int, int], Positions]
    chunks_per_rank: int
    unit: str


IN_RUNS = PositionSplit(split_in_runs, 1, "cp")
IN_ZIGZAG = PositionSplit(split_in_zigzag, 2, "2 x cp, for the zigzag split")

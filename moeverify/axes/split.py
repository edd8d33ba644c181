"""Which rows and positions of the global batch each rank sees, by plain arithmetic."""

from __future__ import annotations

from typing import Literal

ContextKind = Literal["allgather", "alltoall", "torch"]


def split_rows(batch: int, num_ranks: int, rank: int) -> range:
    """Return the consecutive rows of the global batch that a data-parallel rank sees."""
    size = batch // num_ranks
    return range(rank * size, (rank + 1) * size)


def split_positions(seq_len: int, num_ranks: int, rank: int, kind: ContextKind) -> range | tuple[int, ...]:
    """Return the positions of the sequence that a rank of the cp axis sees, in its order.

    `allgather` and `torch` split in zigzag: rank r of n has the chunks r and 2n-1-r of 2n, so that causal attention
    costs every rank the same (Llama 3, arXiv 2407.21783, section 3.3.2). `alltoall` splits in n runs.
    """
    if num_ranks == 1:
        return range(seq_len)
    if kind == "alltoall":
        return split_rows(seq_len, num_ranks, rank)
    first = split_rows(seq_len, 2 * num_ranks, rank)
    second = split_rows(seq_len, 2 * num_ranks, 2 * num_ranks - 1 - rank)
    if first.stop == second.start:
        return range(first.start, second.stop)
    return (*first, *second)

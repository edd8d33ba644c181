"""Which tokens the ranks of a group send to their experts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moeverify.layout.region import Indices

_MOST_COPIES = 1 << 18

Call = tuple[Tensor, ...]
"""The tokens that each rank of one exchange sends, as numbers in the flattened batch, in its order."""


def list_calls(
    shares: Sequence[Sequence[tuple[Indices, Indices]]],
    length: int,
    groups: Sequence[Sequence[int]],
    *,
    slices: Sequence[tuple[int, int]],
    gathered: Mapping[int, Sequence[int]],
) -> list[Call]:
    """Return the exchanges of a step: of each micro-batch one for each group of ranks, the same ones once.

    `shares` has rows and positions of each rank's micro-batches, `slices` which of how many parts of the positions
    it routes, and `gathered` the ranks whose tokens it has besides, in their order.
    """
    calls: dict[tuple[tuple[int, ...], ...], Call] = {}
    for micro_batch in range(len(shares[0])):

        def own(rank: int, micro_batch: int = micro_batch) -> Tensor:
            rows, positions = (torch.tensor(tuple(each)) for each in shares[rank][micro_batch])
            number, count = slices[rank]
            part = positions.chunk(count)[number]
            return (rows.unsqueeze(1) * length + part).flatten()

        for group in groups:
            call = tuple(torch.cat([own(each) for each in gathered.get(rank, (rank,))]) for rank in group)
            calls[tuple(tuple(tokens.tolist()) for tokens in call)] = call
    return list(calls.values())


def keep_whole(calls: Sequence[Call], ids: Tensor, num_experts: int) -> Sequence[Call]:
    """Return the calls where they have every token of the choices `ids` (N, k) once; none where they do not."""
    if not calls:
        return ()
    tokens = torch.cat([torch.cat(call) for call in calls])
    is_whole = torch.equal(tokens.sort().values, torch.arange(len(ids)))
    is_even = all(num_experts % len(call) == 0 for call in calls)
    return calls if is_whole and is_even and ids.numel() <= _MOST_COPIES else ()

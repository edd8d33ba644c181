"""Float64 samples of shards at a constant stride, for many shards in a few operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.parallel.regions.region import Region

MOST_ELEMENTS = 1 << 14
"""Maximum number of evenly spaced elements sampled per shard. A wrong step is wrong in many of them."""


def find_stride(region: Region) -> int:
    """Return the stride at which at most `MOST_ELEMENTS` of a shard are sampled."""
    return -(-region.numel // MOST_ELEMENTS)


def sample_all(shards: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    """Return float64 copies of every `stride`-th element of each (local, stride), in few operations.

    All tensors must be on one device.
    """
    views = [_skip(local, stride) for local, stride in shards]
    if not views:
        return []
    # The common floating-point dtype represents each value exactly.
    together = torch.cat(views).to(torch.float64)
    return list(torch.split_with_sizes(together, [len(view) for view in views]))


def _skip(local: Tensor, stride: int) -> Tensor:
    """Return every `stride`-th element, as a view if possible."""
    if local.is_contiguous() and not local.requires_grad:
        return local.as_strided((-(-local.numel() // stride),), (stride,))
    return local.detach().reshape(-1)[::stride]

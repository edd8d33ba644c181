"""Samples of shards in float64: every so many elements, of many shards in a few operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(local: Tensor, stride: int) -> Tensor:
    """Return a copy of every `stride`-th element, in float64."""
    return sample_all([(local, stride)])[0]


def sample_all(shards: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    """Return copies of every `stride`-th element of (local, stride), in float64, in few operations for all of them.

    All of them are on one device.
    """
    views = [_skip(local, stride) for local, stride in shards]
    if not views:
        return []
    # The common dtype of floating-point numbers holds each of them exactly.
    together = torch.cat(views).to(torch.float64)
    return list(torch.split_with_sizes(together, [len(view) for view in views]))


def _skip(local: Tensor, stride: int) -> Tensor:
    """Return every `stride`-th element as a view, where there is one."""
    if local.is_contiguous() and not local.requires_grad:
        return local.as_strided((-(-local.numel() // stride),), (stride,))
    return local.detach().reshape(-1)[::stride]

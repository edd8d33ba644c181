"""Splits of tensors for float64 recomputation, as large as memory allows.

On a GPU launches dominate the cost of a check, so a few large parts are better than many small ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_MOST_ELEMENTS = 1 << 24  # float64 elements at once: 128 MiB


def split_passes(width: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of tensors (N, ...), such that a dozen float64 results (part, width) fit in memory."""
    size = max(_MOST_ELEMENTS // (16 * width), 1)
    yield from zip(*(torch.split(each, size) for each in tensors), strict=True)


def split_wide(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the tokens of x (N, H), and these in float64. Few enough at once to save memory."""
    size = max(_MOST_ELEMENTS // x.shape[-1], 1)
    for start in range(0, max(len(x), 1), size):  # an empty x has one part
        tokens = slice(start, start + size)
        yield tokens, x[tokens].to(torch.float64)

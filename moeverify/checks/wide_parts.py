"""Parts of tensors for checks that compute again in float64: as large as memory allows.

On a GPU a check costs what its launches cost, so few parts are better than many.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_MOST_ELEMENTS = 1 << 24  # of what is in float64 at once: 128 MiB


def split_passes(width: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors (N, ...) in parts, of which a dozen results (part, width) in float64 take little memory."""
    size = max(_MOST_ELEMENTS // (16 * width), 1)
    yield from zip(*(torch.split(each, size) for each in tensors), strict=True)


def split_wide(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield which tokens of x (N, H), and these in float64: so many at once that they take little memory."""
    size = max(_MOST_ELEMENTS // x.shape[-1], 1)
    for start in range(0, max(len(x), 1), size):  # of no tokens there is one part
        tokens = slice(start, start + size)
        yield tokens, x[tokens].to(torch.float64)

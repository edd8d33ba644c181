"""Initial values that say nothing: norms of ones, biases of zero."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def offset_constants(tensors: Iterable[Tensor], spread: float) -> None:
    """Add random offsets of the size `spread` to each tensor of one value throughout, equal in every process.

    Constants hide what is swapped, missing or taken from another place.
    """
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            tensor.add_(spread * torch.randn(tensor.shape, generator=generator))

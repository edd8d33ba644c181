"""Replacement of constant initial values, such as norm weights of one and biases of zero."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def offset_constants(tensors: Iterable[Tensor], spread: float) -> None:
    """Add random offsets of scale `spread` to each constant tensor, with the same values in every process.

    Constant tensors hide errors that permute elements, drop them or read them from the wrong place.
    """
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            tensor.add_(spread * torch.randn(tensor.shape, generator=generator))

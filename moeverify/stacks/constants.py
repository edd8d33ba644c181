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
        if tensor.is_meta or not tensor.is_floating_point() or tensor.numel() <= 1:
            continue
        if bool((tensor == tensor.flatten()[0]).all()):
            tensor.add_(spread * torch.randn(tensor.shape, generator=generator))

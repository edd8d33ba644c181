"""RMSNorm and LayerNorm over the last dimension, computed in float32 or wider.

They are written out instead of using `torch.nn.RMSNorm`, so that every dtype and device uses the same
operations.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from moeverify.model.param_access import View, identity
from moeverify.model.precision import Factory, widen


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight.

    `average` may be replaced where x is a shard of the normalized dimension: it then returns the mean over
    the whole.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """

    def __init__(self, size: int, eps: float, factory: Factory) -> None:
        super().__init__()
        self.eps = eps
        self.view: View = identity
        self.average: View = identity
        self.weight = nn.Parameter(torch.ones(size, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, in its shape (..., size) and dtype."""
        wide = x.to(widen(x.dtype))
        scale = torch.rsqrt(self.average(wide.square().mean(dim=-1, keepdim=True)) + self.eps)
        return (wide * scale * self.view(self.weight).to(wide.dtype)).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, with the biased variance.

    Source: Ba et al. 2016, "Layer Normalization", equation 4.
    """

    def __init__(self, size: int, eps: float, factory: Factory) -> None:
        super().__init__()
        self.eps = eps
        self.view: View = identity
        self.weight = nn.Parameter(torch.ones(size, **factory))
        self.bias = nn.Parameter(torch.zeros(size, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, in its shape (..., size) and dtype."""
        wide = x.to(widen(x.dtype))
        centred = wide - wide.mean(dim=-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + self.eps)
        weight, bias = self.view(self.weight).to(wide.dtype), self.view(self.bias).to(wide.dtype)
        return (centred * scale * weight + bias).to(x.dtype)


Norm = RMSNorm | LayerNorm


def build_norm(kind: Literal["rms", "layer"], size: int, eps: float, factory: Factory) -> Norm:
    """Return the norm of this kind over a last dimension of `size` elements."""
    return RMSNorm(size, eps, factory) if kind == "rms" else LayerNorm(size, eps, factory)

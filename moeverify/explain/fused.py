"""Recording of fused operators as their parts, to compare them with code that uses separate operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

_FUSED = (
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "_log_softmax",
    "_log_softmax_backward_data",
    "_safe_softmax",
    "_softmax",
    "_softmax_backward_data",
    "addmm",
    "baddbmm",
    "gelu",
    "gelu_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "nll_loss_backward",
    "nll_loss_forward",
    "silu",
    "silu_backward",
    "softplus",
    "softplus_backward",
)


@cache
def list_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Return, for each fused operator of this torch version, a function that computes it from its parts."""
    packets = [getattr(torch.ops.aten, name) for name in _FUSED if hasattr(torch.ops.aten, name)]
    found = {op: made for op, made in get_decompositions(packets).items() if isinstance(op, OpOverload)}
    own: dict[OpOverload, Callable[..., Any]] = {
        torch.ops.aten.add.Tensor: _add_mask,
        torch.ops.aten.softmax.int: _softmax,
        torch.ops.aten.log_softmax.int: _log_softmax,
    }
    return {**found, **own}


def _softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    return torch.ops.aten._softmax(scores if dtype is None else scores.to(dtype), dim, False)


def _log_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    return torch.ops.aten._log_softmax(scores if dtype is None else scores.to(dtype), dim, False)


def _add_mask(scores: Tensor, mask: Tensor, *, alpha: float = 1) -> Any:
    """Add a mask as `masked_fill` if it consists of 0 and one fill value; otherwise return NotImplemented."""
    if alpha != 1 or not isinstance(mask, Tensor) or not mask.numel() or scores.dtype != mask.dtype:
        return NotImplemented
    if not mask.is_floating_point():
        return NotImplemented
    with _disable_current_modes():
        fill = float(mask.min())
        if fill > torch.finfo(mask.dtype).min or not bool(((mask == 0) | (mask == fill)).all()):
            return NotImplemented
    shape = torch.broadcast_shapes(scores.shape, mask.shape)  # type: ignore[no-untyped-call]
    return scores.expand(shape).masked_fill(mask == fill, fill)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Compute `scaled_dot_product_attention` with matrix products and a softmax during the block."""
    with sdpa_kernel(SDPBackend.MATH):
        yield

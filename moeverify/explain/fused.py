"""Fused operators, recorded as the operators that they consist of: other code may compute the same step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel

_FUSED = (
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "_log_softmax",
    "_log_softmax_backward_data",
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
    """Return the function by which each fused operator is computed, of those that this torch has."""
    packets = [getattr(torch.ops.aten, name) for name in _FUSED if hasattr(torch.ops.aten, name)]
    return {op: made for op, made in get_decompositions(packets).items() if isinstance(op, OpOverload)}


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let `scaled_dot_product_attention` compute by matrix products and a softmax while the block runs."""
    with sdpa_kernel(SDPBackend.MATH):
        yield

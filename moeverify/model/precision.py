"""In which dtype a module is built, and in which it computes what a narrow dtype would spoil."""

from __future__ import annotations

from typing import TypedDict

import torch


class Factory(TypedDict):
    """The dtype and device that a module gives to its parameters."""

    dtype: torch.dtype
    device: torch.device


def widen(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for norms, softmax and routing: float64 stays, everything narrower is float32."""
    return torch.promote_types(dtype, torch.float32)

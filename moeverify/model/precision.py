"""Dtypes of modules, and the wider dtype of computations that a narrow dtype would spoil."""

from __future__ import annotations

from typing import TypedDict

import torch


class Factory(TypedDict):
    """The dtype and device of a module's parameters."""

    dtype: torch.dtype
    device: torch.device


def widen(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of norms, softmax and routing: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)

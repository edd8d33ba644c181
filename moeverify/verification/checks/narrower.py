"""Narrower dtypes that values may have been rounded to, and their names in reports."""

from __future__ import annotations

import torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def list_narrower(*dtypes: torch.dtype) -> list[torch.dtype]:
    """Return the dtypes that are narrower than each of these, narrowest first."""
    least = min(dtype.itemsize for dtype in dtypes)
    return [dtype for dtype in _DTYPES if dtype.itemsize < least]


def is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a floating-point dtype has fewer bits than another."""
    return dtype.is_floating_point and other.is_floating_point and dtype.itemsize < other.itemsize


def dtype_called(name: str) -> torch.dtype:
    """Return the dtype with a name, such as `bfloat16`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")

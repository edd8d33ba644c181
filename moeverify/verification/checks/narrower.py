"""Narrower dtypes that values may have been rounded to, and their names in reports."""

from __future__ import annotations

import torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def list_narrower(*dtypes: torch.dtype) -> list[torch.dtype]:
    """Return the dtypes that are narrower than each of these, narrowest first."""
    least = min(dtype.itemsize for dtype in dtypes)
    return [dtype for dtype in _DTYPES if dtype.itemsize < least]


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")

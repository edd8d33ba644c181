"""Whether Triton can compile kernels for a device."""

from __future__ import annotations

import shutil
from functools import cache
from importlib.util import find_spec

import torch


def can_compile(device: torch.device) -> bool:
    """Return whether a kernel can run on this device: a GPU, Triton, and a C compiler for its launcher."""
    return device.type == "cuda" and _has_compiler()


@cache
def _has_compiler() -> bool:
    return find_spec("triton") is not None and any(shutil.which(name) for name in ("gcc", "clang"))

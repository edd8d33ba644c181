"""Hooks that watch a module without being taken for a part of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

P = ParamSpec("P")
R = TypeVar("R")


def unseen(hook: Callable[P, R]) -> Callable[P, R]:
    """Return a hook whose operations no dispatch mode sees.

    Selective activation checkpointing is such a mode: it numbers the operations of a module, and keeps the results of
    some by their numbers. What a hook computes in the forward pass, and not again in the recomputation, or the other
    way round, would give the module the results of other operations.
    Source: torch.utils.checkpoint.create_selective_checkpoint_contexts.
    """

    @wraps(hook)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # What torch.compile traces of a hook runs in its graph, where no mode is.
        if torch.compiler.is_compiling() or not _get_current_dispatch_mode_stack():
            return hook(*args, **kwargs)
        with _disable_current_modes():
            return hook(*args, **kwargs)

    return call

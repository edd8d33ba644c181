"""Hooks on modules whose operations are hidden from dispatch modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

P = ParamSpec("P")
R = TypeVar("R")


def unseen(hook: Callable[P, R]) -> Callable[P, R]:
    """Return the hook, wrapped so that no dispatch mode sees its operations.

    Selective activation checkpointing is such a mode: it numbers the operations of a module and stores some
    results by number. If a hook computes in only one of the forward pass and the recomputation, the numbers
    shift and the module gets results of other operations.

    Source: torch.utils.checkpoint.create_selective_checkpoint_contexts.
    """

    @wraps(hook)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # Operations of a compiled hook run in its graph, where no mode is active.
        if torch.compiler.is_compiling() or not _get_current_dispatch_mode_stack():
            return hook(*args, **kwargs)
        with _disable_current_modes():
            return hook(*args, **kwargs)

    return call

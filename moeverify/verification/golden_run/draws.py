"""Where a model draws random numbers."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from moeverify.explain.operators import has_dropout
from moeverify.train.target import is_users


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Records the lines of the user's code that call a random operator, in the order of their first call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operator, and record its line if it is random."""
        if torch.Tag.nondeterministic_seeded in func.tags and has_dropout(func, args, kwargs or {}):
            frames = [each for each in traceback.extract_stack(sys._getframe(1)) if is_users(each.filename)]
            if frames:
                self.lines[f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"] = None
        return func(*args, **(kwargs or {}))


def find_draws(call: Callable[[], object]) -> list[str]:
    """Return the lines of the user's code that draw random numbers during a call, as `file:line: source`."""
    with Draws() as draws:
        call()
    return list(draws.lines)

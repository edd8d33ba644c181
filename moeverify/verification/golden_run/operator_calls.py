"""Calls of operators in one run on one device, and the lines of the user's code that make them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from moeverify.train.target import is_users

Call = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]
"""Function that calls an operator with its arguments and named arguments, and returns its result."""


class OperatorCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Passes each call of an operator through `call`."""

    def __init__(self, call: Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the result of `call`."""
        return self._call(func, args, kwargs or {})


def find_user_line() -> str:
    """Return the innermost line of the user's code that calls this function, as `file:line: source`, or ""."""
    frames = [each for each in traceback.extract_stack(sys._getframe(1)) if is_users(each.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""

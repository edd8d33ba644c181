"""Lines of user code that a process executes, with or without tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from moeverify.explain.program import SETUP
from moeverify.explain.sites import is_of_user

Line = tuple[str, int]
"""(file, line)."""


_PAUSES = sys.version_info < (3, 12)
"""Whether tracing slows down all Python code, and a pause costs little. Later versions trace each function anew."""


def untraced(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Pause `Lines` while a `__torch_dispatch__` handles an operator of `aten`, which runs no code of users."""

    @functools.wraps(dispatch)
    def handle(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = sys.gettrace()
        is_paused = (
            _PAUSES and func.namespace == "aten" and isinstance(getattr(tracer, "__self__", None), Lines)
        )
        if not is_paused:
            return dispatch(mode, func, types, args, kwargs)
        sys.settrace(None)
        try:
            return dispatch(mode, func, types, args, kwargs)
        finally:
            sys.settrace(tracer)

    return handle


class Lines:
    """Tracer that adds executed lines to `found`, by step.

    It does nothing while a debugger or another tracer is active.
    """

    def __init__(self, found: dict[int, set[Line]]) -> None:
        self._found = found
        self.begin(SETUP)

    def begin(self, step: int) -> None:
        """Set the step of the lines that follow."""
        self._lines = self._found.setdefault(step, set())

    @contextmanager
    def following(self) -> Iterator[None]:
        """Trace the lines of this thread during the block."""
        if sys.gettrace() is not None:
            yield
            return
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        """Return the tracer of a function: None for functions of libraries and of this package."""
        return self._note if is_of_user(frame.f_code.co_filename) else None

    def _note(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._note

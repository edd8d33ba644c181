"""Lines of user code that a process executes, with or without tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from moeverify.explain.program import SETUP
from moeverify.explain.sites import is_of_user

Line = tuple[str, int]
"""(file, line)."""


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

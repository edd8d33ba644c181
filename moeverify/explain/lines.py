"""Lines of user code that a process executes, and the Python values that they assign."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from moeverify.explain.program import SETUP, Program
from moeverify.explain.python_values import MOST_VALUES, encode
from moeverify.explain.sites import is_of_user
from moeverify.explain.syntax import RETURNED, map_assignments

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
    """Tracer that adds executed lines and assigned values to a program, by step.

    It does nothing while a debugger or another tracer is active.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.begin(SETUP)

    def begin(self, step: int) -> None:
        """Set the step of the lines that follow."""
        self.lines = self._program.lines.setdefault(step, set())
        self._values = self._program.names.setdefault(step, {})

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

    def keep(self, file: str, line: int, name: str, value: object) -> None:
        """Add a value that the program assigned to a name."""
        values = self._values.setdefault((file, line, name), [])
        if len(values) < MOST_VALUES:
            values.append(encode(value))

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        """Return the tracer of a function: None for functions of libraries and of this package."""
        return _Call(self, frame).note if is_of_user(frame.f_code.co_filename) else None


class _Call:
    """Tracer of one call of a function."""

    def __init__(self, lines: Lines, frame: FrameType) -> None:
        code = frame.f_code
        self._lines, self._file, self._last = lines, code.co_filename, 0
        self._assignments = map_assignments(code.co_filename)
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            lines.keep(self._file, code.co_firstlineno, name, frame.f_locals.get(name))

    def note(self, frame: FrameType, event: str, result: Any) -> Any:
        """Add a line before it runs, and then the values that the line before it assigned."""
        first, names = self._assignments.get(self._last, (self._last, ()))
        if event != "exception":
            for name in names:
                found = _look_up(frame.f_locals, name.split("."))
                if found:
                    self._lines.keep(self._file, first, name, found[0])
        if event == "line":
            self._last = frame.f_lineno
            self._lines.lines.add((self._file, self._last))
        elif event == "return":
            self._lines.keep(self._file, first, RETURNED, result)
        return self.note


def _look_up(names: Mapping[str, Any], path: list[str]) -> tuple[Any, ...]:
    """Return the value of a name and its attributes, such as `self.size`; empty if only code could compute it."""
    for number, name in enumerate(path):
        if number:
            names = getattr(names[path[number - 1]], "__dict__", {})
        if name not in names:
            return ()
    return (names[path[-1]],)

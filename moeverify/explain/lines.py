"""Lines of user code that a process executes, and the Python values that they assign."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from moeverify.explain.program import SETUP, Executed
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
    """Tracer that adds executed lines and assigned values to `executed`, by step.

    It does nothing while a debugger or another tracer is active. With `most`, it follows only this number of lines of
    each function in a step, so that a loop in Python costs little.
    """

    def __init__(self, executed: Executed, most: int | None = None) -> None:
        self._executed, self._most = executed, most
        self.begin(SETUP)

    def begin(self, step: int) -> None:
        """Set the step of the lines that follow."""
        self._step, self._lines = step, self._executed.lines.setdefault(step, set())
        self._values = self._executed.names.setdefault(step, {})
        self._counts: Counter[CodeType] = Counter()
        for frame in _list_running():
            frame.f_trace_lines = True  # `count` may have switched it off

    @contextmanager
    def following(self, *, is_running: bool = False) -> Iterator[None]:
        """Trace the lines of this thread during the block, with `is_running` also of functions that run already."""
        if sys.gettrace() is not None:
            yield
            return
        sys.settrace(self._enter)
        for frame in _list_running() if is_running else ():
            frame.f_trace = _Call(self, frame).note
        try:
            yield
        finally:
            if sys.gettrace() == self._enter:  # else the program has started a debugger
                sys.settrace(None)

    def count(self, frame: FrameType) -> None:
        """Count a line of a function, and stop to follow it if there were too many in this step."""
        if self._most is None:
            return
        code = frame.f_code
        self._counts[code] += 1
        if self._is_over(code):
            frame.f_trace_lines = False
            lines = [line for *_, line in code.co_lines() if line is not None]
            self._executed.skipped.add((code.co_filename, code.co_firstlineno, max(lines)))

    def _is_over(self, code: CodeType) -> bool:
        return self._most is not None and self._counts[code] > self._most

    def note(self, line: tuple[str, int]) -> None:
        """Add a (file, line) that is about to run."""
        if line not in self._lines:
            self._executed.note_line(self._step, line)

    def keep(self, file: str, line: int, name: str, value: object) -> None:
        """Add a value that the program assigned to a name."""
        values = self._values.setdefault((file, line, name), [])
        if len(values) < MOST_VALUES:
            values.append(encode(value))

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        """Return the tracer of a function: None for functions of libraries and of this package."""
        is_followed = is_of_user(frame.f_code.co_filename) and not self._is_over(frame.f_code)
        return _Call(self, frame).note if is_followed else None


class _Call:
    """Tracer of one call of a function."""

    def __init__(self, lines: Lines, frame: FrameType) -> None:
        code = frame.f_code
        self._lines, self._file, self._last = lines, code.co_filename, 0
        self._assignments = map_assignments(code.co_filename)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        found = frame.f_locals if names else {}  # each access copies all variables
        for name in names:
            lines.keep(self._file, code.co_firstlineno, name, found.get(name))

    def note(self, frame: FrameType, event: str, result: Any) -> Any:
        """Add a line before it runs, and then the values that the line before it assigned."""
        first, names = self._assignments.get(self._last, (self._last, ()))
        if names and event != "exception":
            variables = frame.f_locals
            for name in names:
                found = _look_up(variables, name.split("."))
                if found:
                    self._lines.keep(self._file, first, name, found[0])
        if event == "line":
            self._last = frame.f_lineno
            self._lines.note((self._file, self._last))
            self._lines.count(frame)
        elif event == "return":
            self._lines.keep(self._file, first, RETURNED, result)
        return self.note


def _list_running() -> Iterator[FrameType]:
    """Yield the frames of this thread that execute user code, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_user(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _look_up(names: Mapping[str, Any], path: list[str]) -> tuple[Any, ...]:
    """Return the value of a name and its attributes, such as `self.size`; empty if only code could compute it.

    No code of the program runs: its `__getattr__` may fail on an object whose `__init__` is not over.
    """
    for number, name in enumerate(path):
        if number:
            try:
                names = object.__getattribute__(names[path[number - 1]], "__dict__")
            except AttributeError:  # an object with slots
                return ()
        if name not in names:
            return ()
    return (names[path[-1]],)

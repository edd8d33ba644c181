"""The line of a script that drew the batch of a forward pass."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from moeverify.train.calls.listener import is_inner_file

_MOST_FRAMES = 32
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_draw(frame: FrameType | None, tensor: Tensor) -> str:
    """Return file:line of the statement that bound the memory of `tensor` to a variable, or an empty string.

    `frame` is a frame below the script's call of the model. A batch that functions pass on as an argument is
    found in the outermost of them.
    """
    storage = _find_memory(tensor)
    found: tuple[FrameType, str] | None = None
    for _ in range(_MOST_FRAMES):
        if frame is None or not storage:
            break
        if not is_inner_file(frame.f_code.co_filename):
            name = _find_name(frame.f_locals, storage)
            found = (frame, name) if name else found
        frame = frame.f_back
    if found is None:
        return ""
    line = _find_binding(found[0], found[1])
    return f"{Path(found[0].f_code.co_filename).name}:{line}" if line else ""


def _find_memory(value: object) -> int:
    try:
        return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0
    except (RuntimeError, NotImplementedError):
        return 0  # a tensor without memory, such as a fake one


def _find_name(variables: Mapping[str, Any], storage: int) -> str:
    """Return the variable with the largest tensor in this memory, also as an element of a container."""
    best, size = "", 0
    for name, value in variables.items():
        parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        for part in parts:
            if isinstance(part, Tensor) and part.numel() > size and _find_memory(part) == storage:
                best, size = name, part.numel()
    return best


def _find_binding(frame: FrameType, name: str) -> int:
    """Return the line of the last statement before the frame's line that draws the variable, or the last one.

    A statement that computes the variable from itself, such as a move to a device, draws nothing.
    """
    body = _read_body(frame.f_code.co_filename, frame.f_code.co_name, frame.f_code.co_firstlineno)
    lines = sorted(line for each in body for line in _list_bindings(each, name))
    before = [line for line in lines if line < frame.f_lineno]
    return (before or lines or [0])[-1]


@lru_cache(maxsize=8)
def _read_body(file: str, function: str, first: int) -> tuple[ast.stmt, ...]:
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return ()
    if function == "<module>":
        return tuple(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, _Function) and node.name == function:
            starts = [node.lineno, *(each.lineno for each in node.decorator_list)]
            if first in starts:
                return tuple(node.body)
    return ()


def _list_bindings(statement: ast.stmt, name: str) -> Iterator[int]:
    """Yield the lines at which a statement, or one inside of it, binds a variable to a new value."""
    if isinstance(statement, _Function | ast.ClassDef):
        return
    targets: list[ast.expr] = []
    value: ast.expr | None = None
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign):
        targets, value = [statement.target], statement.value
    elif isinstance(statement, ast.For):
        targets, value = [statement.target], statement.iter
    is_bound = any(_mentions(target, name) for target in targets)
    if is_bound and value is not None and not _mentions(value, name):
        yield statement.lineno
    for field in ("body", "orelse", "finalbody", "handlers"):
        for inner in getattr(statement, field, []):
            if isinstance(inner, ast.stmt):
                yield from _list_bindings(inner, name)


def _mentions(node: ast.expr, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))

"""The line of a script that drew the batch of a forward pass, and the tensors of the batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn

from moeverify.scripts.record.model import find_inputs, is_rows, list_parts
from moeverify.train.calls.listener import is_inner_file

_MOST_FRAMES = 32
INPUT = "input "
"""Beginning of the name of a model input in `list_batch`."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_draw(frame: FrameType | None, tensor: Tensor) -> str:
    """Return file:line of the statement that bound the memory of `tensor` to a variable, or an empty string.

    `frame` is a frame below the script's call of the model. A batch that functions pass on as an argument is
    found in the outermost of them.
    """
    frames, name = _find_frames(frame, tensor)
    line = _find_binding(frames[-1], name) if name else 0
    return f"{Path(frames[-1].f_code.co_filename).name}:{line}" if line else ""


def list_batch(frame: FrameType | None) -> dict[str, Tensor]:
    """Return the tensors of the batch of a forward pass, each once, by a name that other runs have too.

    These are the inputs of the model, and tensors with as many rows as the first input, such as labels or the
    noise of a loss. The latter are in variables of the functions between the draw of the batch and the call
    of the model. Excluded are activations of other ranks, which need gradients, and outputs of other modules:
    an error in these must stay visible.
    """
    given = [(f"{INPUT}{name}", each) for name, each in find_inputs(frame) if _is_drawn(each)]
    if not given:
        return {}
    first = given[0][1]
    frames, _ = _find_frames(frame, first)
    for each in frames:
        found = [(f"{each.f_code.co_name}.{name}", value) for name, value in each.f_locals.items()]
        # Variables come first: the place of a micro-batch in a list depends on the number of micro-batches.
        found += [(f"{name}.{key}", part) for name, value in found for key, part in list_parts(value)]
        given += [(name, part) for name, part in found if _is_drawn(part) and _is_beside(part, first)]
        given += [
            (f"{each.f_code.co_name}.{name}", value)
            for name, value in each.f_locals.items()
            if _is_drawn(value) and _is_noise(value, first) and not _calls_module(each, name)
        ]
    once = {id(tensor): name for name, tensor in reversed(given)}
    return {name: tensor for name, tensor in given if once[id(tensor)] == name}


def find_batch(frame: FrameType | None) -> Tensor | None:
    """Return the input of the model that identifies the rows of the batch: integers, if there are any.

    Another input is the batch only if no gradient passes through it: it is no activation of another rank.
    """
    inputs = [each for _, each in find_inputs(frame) if each.ndim > 1]
    drawn = [each for each in inputs if _is_drawn(each) and not each.is_complex()]
    return next((each for each in inputs if is_rows(each)), drawn[0] if drawn else None)


def is_input(name: str) -> bool:
    """Return whether a name of `list_batch` belongs to an input of the model."""
    return name.startswith(INPUT)


def _is_drawn(value: object) -> bool:
    return type(value) is Tensor and value.ndim > 0 and value.is_leaf and not value.requires_grad


def _is_beside(tensor: Tensor, first: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return False
    return len(tensor) == len(first) or (tensor.ndim == 1 and tensor.numel() == first.numel())


def _is_noise(tensor: Tensor, first: Tensor) -> bool:
    return tensor.is_floating_point() and len(tensor) == len(first)


def _calls_module(frame: FrameType, name: str) -> bool:
    """Return whether a statement of the frame binds a variable to a value that a module computes."""
    body = _read_body(frame.f_code.co_filename, frame.f_code.co_name, frame.f_code.co_firstlineno)
    values = [value for each in body for _, value in _list_bindings(each, name)]
    calls = (node for value in values for node in ast.walk(value) if isinstance(node, ast.Call))
    variables = {**frame.f_globals, **frame.f_locals}
    return any(_has_module(call.func, variables) for call in calls)


def _has_module(function: ast.expr, variables: Mapping[str, Any]) -> bool:
    """Return whether a called expression such as `self.teacher.encode` has a module in it."""
    names: list[str] = []
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    value = variables.get(function.id) if isinstance(function, ast.Name) else None
    while names and not isinstance(value, nn.Module):
        value = getattr(value, "__dict__", {}).get(names.pop())
    return isinstance(value, nn.Module)


def _find_frames(frame: FrameType | None, tensor: Tensor) -> tuple[list[FrameType], str]:
    """Return the script's frames up to the outermost with a variable in the memory of `tensor`, and its name.

    The innermost frame of the script is returned alone, without a name, if no frame has such a variable.
    """
    storage = _find_memory(tensor)
    frames: list[FrameType] = []
    found, num_found = "", 1
    for _ in range(_MOST_FRAMES):
        if frame is None or not storage:
            break
        if not is_inner_file(frame.f_code.co_filename):
            frames.append(frame)
            name = _find_name(frame.f_locals, storage)
            found, num_found = (name, len(frames)) if name else (found, num_found)
        frame = frame.f_back
    return frames[:num_found], found


def _find_memory(value: object) -> int:
    try:
        return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0
    except (RuntimeError, NotImplementedError):
        return 0  # a tensor without memory, such as a fake one


def _find_name(variables: Mapping[str, Any], storage: int) -> str:
    """Return the variable with the largest tensor in this memory, also as an element of a container."""
    best, size = "", 0
    for name, value in variables.items():
        for _, part in (("", value), *list_parts(value)):
            if isinstance(part, Tensor) and part.numel() > size and _find_memory(part) == storage:
                best, size = name, part.numel()
    return best


def _find_binding(frame: FrameType, name: str) -> int:
    """Return the line of the last statement before the frame's line that draws the variable, or the last one.

    A statement that computes the variable from itself, such as a move to a device, draws nothing.
    """
    body = _read_body(frame.f_code.co_filename, frame.f_code.co_name, frame.f_code.co_firstlineno)
    lines = sorted(line for each in body for line, _ in _list_bindings(each, name))
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


def _list_bindings(statement: ast.stmt, name: str) -> Iterator[tuple[int, ast.expr]]:
    """Yield (line, value) where a statement, or one inside of it, binds a variable to a new value."""
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
        yield statement.lineno, value
    for field in ("body", "orelse", "finalbody", "handlers"):
        for inner in getattr(statement, field, []):
            if isinstance(inner, ast.stmt):
                yield from _list_bindings(inner, name)


def _mentions(node: ast.expr, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))

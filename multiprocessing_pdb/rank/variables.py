"""The variables of a stopped thread's frame, for an editor that expands them level by level."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from multiprocessing_pdb.rank.expressions import compile_expression, evaluate
from multiprocessing_pdb.wire.framing import Frame

_MOST_CHILDREN = 200
_MOST_CHARACTERS = 400

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _MOST_CHARACTERS


def find_names(debugger: Any, index: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the global and local names of one frame of the debugger's stack.

    For the current frame, the locals include assignments at the prompt.

    Raises IndexError when there is no such frame.
    """
    if not 0 <= index < len(debugger.stack):
        raise IndexError(f"no frame {index}: the rank has moved on")
    frame = debugger.stack[index][0]
    if frame is debugger.curframe:
        return frame.f_globals, debugger.frame_locals()
    return frame.f_globals, frame.f_locals


def evaluate_in(debugger: Any, index: int, text: str) -> Any:
    """Return the value of an expression in one frame. Exceptions of the expression propagate."""
    return evaluate(compile_expression(text, "<editor>"), *find_names(debugger, index))


def describe(name: str, text: str, value: object) -> Frame:
    """Return the fields of one value. `text` is the expression for it, or "" if there is none."""
    try:
        shown = _REPR.repr(value)
    except Exception as error:  # repr defined by the user
        shown = f"<repr raises {type(error).__name__}: {error}>"
    return {
        "name": name,
        "text": text,
        "value": shown[:_MOST_CHARACTERS],
        "type": type(value).__name__,
        "has_children": bool(text) and next(_list_children(text, value), None) is not None,
    }


def describe_names(names: Mapping[str, Any]) -> list[Frame]:
    """Return the variables of a scope, by name, without names that start with two underscores."""
    shown = sorted(name for name in names if not name.startswith("__"))
    return [describe(name, name, names[name]) for name in shown[:_MOST_CHILDREN]]


def describe_children(text: str, value: object) -> list[Frame]:
    """Return the children of the value of `text`: items of containers, attributes of other objects."""
    return [describe(*child) for child in islice(_list_children(text, value), _MOST_CHILDREN)]


def _list_children(text: str, value: object) -> Iterator[tuple[str, str, object]]:
    """Yield name, expression and value of stored children only: no property is evaluated."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str | int | bool | None):
                yield repr(key), f"({text})[{key!r}]", item
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield f"[{at}]", f"({text})[{at}]", item
    elif not isinstance(value, type) and isinstance(attributes := getattr(value, "__dict__", None), dict):
        for name, item in attributes.items():
            if isinstance(name, str) and name.isidentifier():
                yield name, f"({text}).{name}", item

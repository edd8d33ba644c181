"""The steps of a module: every call of torch that it makes, in order, each of which may be made otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]
Change = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
"""Makes a step otherwise: it is called with the function and its arguments, and returns what the step should."""

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
# What only asks for a property of a tensor, or has no effect on its values, is no step.
_NO_STEPS = frozenset(
    {
        "__get__",
        "__set__",
        "__len__",
        "__bool__",
        "__format__",
        "__repr__",
        "size",
        "dim",
        "numel",
        "stride",
        "item",
        "tolist",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "contiguous",
        "requires_grad_",
        "register_hook",
        "get_device",
        "data_ptr",
        "storage_offset",
        "element_size",
        "__hash__",
        "has_names",
        "_set_grad_enabled",
        "backward",
    }
)


@dataclass(frozen=True)
class Step:
    """A step of a run: its number, what it is called, where it is in the source, and what it took and made.

    `site` is the call in the source that makes it, of which a loop makes several steps. `line` is where that is.
    """

    number: int
    name: str
    site: tuple[str, int]
    line: str
    module: str
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    result: Any


class StepMode(TorchFunctionMode):
    """Counts the steps of a run, makes some of them otherwise, and keeps all of them where it `keeps`."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self._keeps = keeps
        self._changes: Mapping[int, Change] = {}
        self._count = 0
        self.steps: list[Step] = []
        self.inside: list[str] = []

    def begin(self, changes: Mapping[int, Change]) -> None:
        """Start a run in which these steps are otherwise."""
        self._changes, self._count = changes, 0
        self.steps.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make a step, or what it is changed to."""
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _NO_STEPS:
            return func(*args, **named)
        number, self._count = self._count, self._count + 1
        change = self._changes.get(number)
        result = func(*args, **named) if change is None else change(func, args, named)
        if self._keeps:
            module = self.inside[-1] if self.inside else ""
            kept = _detach(args), _detach(named), _detach(result)
            site, line = _find_site()
            self.steps.append(Step(number, name, site, line, module, *kept))
        return result


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return tuple(_detach(item) for item in value)
    if isinstance(value, dict):
        return {key: _detach(item) for key, item in value.items()}
    return value


def _find_site() -> tuple[tuple[str, int], str]:
    """Return the call that makes a step, of the innermost function that is none of torch, and `file.py:12`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OWN) and name != __file__:
            break  # it is no step of the module
        if name != __file__ and not name.startswith(_TORCH):
            function = f"{name}:{frame.f_code.co_qualname}"
            return (function, frame.f_lasti), f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ("", 0), ""

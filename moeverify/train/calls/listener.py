"""Base class of listeners to a training script, which hooks call."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moeverify.parallel.regions.passes import is_in_backward, is_trial_pass

P = ParamSpec("P")
_Self = TypeVar("_Self", bound="Listener")
_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)


def safely(method: Callable[Concatenate[_Self, P], None]) -> Callable[Concatenate[_Self, P], None]:
    """Return a method that never raises into the script: an error ends the listening through `fail`.

    The method runs without gradients and within `unseen`. It does nothing after the listener has stopped,
    or in a forked child process.
    """

    @functools.wraps(method)
    def call(self: _Self, /, *values: P.args, **named: P.kwargs) -> None:
        # A forked child, such as a worker of a data loader, shares the files of its parent.
        if not self.is_active or os.getpid() != self.pid:
            return
        try:
            with torch.no_grad(), self.unseen():
                method(self, *values, **named)
        except Exception as error:
            self.fail(error)

    return call


class Listener:
    """Receives the forward passes, backward passes and optimizer calls of this process.

    `on_stop` is called when the listener stops, and `on_model` when it first sees a model. The listener's
    own computations run within `unseen`.
    """

    def __init__(self) -> None:
        self.is_active = True
        self.on_stop: Callable[[], object] = lambda: None
        self.on_model: Callable[[], object] = lambda: None
        self.pid = os.getpid()
        self.unseen: Callable[[], AbstractContextManager[None]] = nullcontext
        self._depth = threading.local()
        self._nested: set[str] = set()

    def enter_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Handle the start of a module's forward pass. The outermost module is the model.

        In a backward pass, the outermost module is a recomputed checkpointed part, not a model.
        """
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth == 0 and not is_in_backward():
            trains = torch.is_grad_enabled() and module.training and not is_trial_pass()
            self.enter_model(module, sys._getframe(1), trains)
        else:
            self.enter_inner(inputs)

    def leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Handle the end of a module's forward pass, also if it raised."""
        self._depth.value = getattr(self._depth, "value", 1) - 1

    @contextmanager
    def nested(self, label: str) -> Iterator[bool]:
        """Yield whether no enclosing call has this name."""
        if label in self._nested:
            yield False
            return
        self._nested.add(label)
        try:
            yield True
        finally:
            self._nested.discard(label)

    def enter_model(self, module: nn.Module, frame: Any, trains: bool) -> None:
        """Handle the start of the forward pass of an outermost module.

        `frame` is the frame of the hook's caller. `trains` is whether gradients are enabled and the module
        is in training mode.
        """

    def enter_inner(self, inputs: tuple[Any, ...]) -> None:
        """Handle the start of the forward pass of a module inside the model."""

    def note_call(self, label: str) -> None:
        """Handle a call of a scheduler or a gradient scaler."""

    def before_backward(self) -> None:
        """Handle the start of a backward pass."""

    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """Handle the end of a backward pass."""

    def before_zero_grad(self) -> None:
        """Handle a `zero_grad` before it discards gradients."""

    def before_clip(self, label: str, parameters: object) -> None:
        """Handle a clip before it changes gradients."""

    def after_clip(self, label: str, norm: object, limit: object) -> None:
        """Handle the end of a clip, with the norm that it computed."""

    def before_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Handle the start of an optimizer step."""

    def after_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Handle the end of an optimizer step."""

    def fail(self, error: Exception) -> None:
        """Stop, and write the error to stderr."""
        raise NotImplementedError


def find_site() -> str:
    """Return file:line of the script's code that called into torch, or an empty string."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<")) and not file.endswith("contextlib.py"):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def to_float(value: Any) -> float:
    """Return a number, or a tensor of one element, as a float.

    For a DTensor this is a collective: all ranks of its mesh must call it.
    """
    return float(value.full_tensor()) if hasattr(value, "full_tensor") else float(value)

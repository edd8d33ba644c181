"""What hooks of a training script call: the part that every listener has, whatever it does with the calls."""

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

from moeverify.layout.passes import is_in_backward, is_trial_pass

P = ParamSpec("P")
_Self = TypeVar("_Self", bound="Listener")
_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


def safely(method: Callable[Concatenate[_Self, P], None]) -> Callable[Concatenate[_Self, P], None]:
    """Return a method that never raises into the script: what goes wrong ends the listening, with a line."""

    @functools.wraps(method)
    def call(self: _Self, /, *values: P.args, **named: P.kwargs) -> None:
        # A child that was forked, such as a worker of a data loader, has the files of its parent.
        if not self.is_active or os.getpid() != self.pid:
            return
        try:
            with torch.no_grad(), self.unseen():
                method(self, *values, **named)
        except Exception as error:
            self.fail(error)

    return call


class Listener:
    """Is told of forward passes, backward passes and optimizer calls of this process.

    `on_stop` is called when it wants to be told no more, `on_model` when a model is seen for the first time. What it
    computes itself runs in `unseen`.
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
        """Note that a module's forward pass begins. The outermost one is the model.

        Within a backward pass it is a checkpointed part that is computed again, and no model.
        """
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth == 0 and not is_in_backward():
            trains = torch.is_grad_enabled() and module.training and not is_trial_pass()
            self.enter_model(module, sys._getframe(1), trains)
        else:
            self.enter_inner(inputs)

    def leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note that a module's forward pass is over, also where it raised."""
        self._depth.value = getattr(self._depth, "value", 1) - 1

    @contextmanager
    def nested(self, label: str) -> Iterator[bool]:
        """Give whether no call of this name is around this one."""
        if label in self._nested:
            yield False
            return
        self._nested.add(label)
        try:
            yield True
        finally:
            self._nested.discard(label)

    def enter_model(self, module: nn.Module, frame: Any, trains: bool) -> None:
        """Note that the forward pass of an outermost module begins; `frame` is that of the hook's caller."""

    def enter_inner(self, inputs: tuple[Any, ...]) -> None:
        """Note that the forward pass of a module inside the model begins."""

    def note_call(self, label: str) -> None:
        """Note a call of the training loop: of a scheduler or a gradient scaler."""

    def before_backward(self) -> None:
        """Note that a backward pass begins."""

    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """Note that a backward pass is over."""

    def before_zero_grad(self) -> None:
        """Note that gradients are about to be thrown away."""

    def before_clip(self, label: str, parameters: object) -> None:
        """Note that gradients are about to be clipped."""

    def after_clip(self, label: str, norm: object, limit: object) -> None:
        """Note that gradients were clipped, with the norm that was found."""

    def before_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Note that an optimizer is about to step."""

    def after_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Note that an optimizer has made its step."""

    def fail(self, error: Exception) -> None:
        """Stop, and write why to stderr."""
        raise NotImplementedError


def find_site() -> str:
    """Return file:line of the code that called into torch, as the script's author would name it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<")) and not file.endswith("contextlib.py"):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def to_float(value: Any) -> float:
    """Return a number or a tensor of one element. Collective for a DTensor: all ranks of its mesh."""
    return float(value.full_tensor()) if hasattr(value, "full_tensor") else float(value)

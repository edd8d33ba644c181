"""Base class of listeners to a training script, which hooks call.

A forward pass that a script starts with `module.forward(...)` runs no hook of torch; it is noticed apart.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.data.distributed import DistributedSampler

from moeverify.parallel.regions.passes import is_in_backward, is_trial_pass
from moeverify.parallel.regions.unseen import unseen

P = ParamSpec("P")
_Self = TypeVar("_Self", bound="Listener")
_OURS = str(Path(__file__).parents[2])
_INSTALLED = ("site-packages", "dist-packages")
_TORCH = str(Path(torch.__file__).parent)
_STEP = f"{Optimizer.profile_hook_step.__qualname__}.<locals>.wrapper"
DECORATORS = ("/contextlib.py", "/functools.py", "/typing_extensions.py", "/warnings.py")
"""Files whose decorators wrap torch functions: their frames are between a torch function and its caller."""


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

    `on_stop` is called when the listener stops, `on_model` when it first sees a model, and `on_bypass` with
    the first module of a class whose `forward` is called directly. The listener's own computations run
    within `unseen`.
    """

    def __init__(self) -> None:
        self.is_active = True
        self.on_stop: Callable[[], object] = lambda: None
        self.on_model: Callable[[], object] = lambda: None
        self.on_bypass: Callable[[nn.Module], object] = lambda module: None
        self.pid = os.getpid()
        self.unseen: Callable[[], AbstractContextManager[None]] = nullcontext
        self._depth = threading.local()
        self._nested: set[str] = set()
        self._bypassed: WeakSet[nn.Module] = WeakSet()

    @property
    def is_in_model(self) -> bool:
        """Return whether this thread is in the forward pass of a module."""
        return bool(getattr(self._depth, "value", 0))

    def enter_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Handle the start of a module's forward pass. The outermost module is the model.

        In a backward pass, the outermost module is a recomputed checkpointed part, not a model. A module
        whose `forward` is called directly is a model too. Its first pass is noticed at its first submodule,
        and later ones by a wrapper (see `on_bypass`).
        """
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth or is_in_backward():
            self.enter_inner(module, inputs)
            return
        owner = find_bypassed(module)
        if owner is None or owner not in self._bypassed:
            outer = module if owner is None else owner
            learns = torch.is_grad_enabled() and not is_trial_pass()
            self.enter_model(outer, _find_caller() if owner is None else None, learns)
        if owner is not None:
            if owner not in self._bypassed:
                self._bypassed.add(owner)
                self.on_bypass(owner)
            self.enter_inner(module, inputs)

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

    def enter_model(self, module: nn.Module, frame: Any, learns: bool) -> None:
        """Handle the start of the forward pass of an outermost module.

        `frame` is the frame of the hook's caller, None if the inputs are unknown. `learns` is whether
        gradients are enabled.
        """

    def enter_inner(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Handle the start of the forward pass of a module inside the model."""

    def note_call(self, label: str, owner: object = None) -> None:
        """Handle a call of a scheduler or a gradient scaler, the `owner`."""

    def begin_epoch(self, sampler: DistributedSampler[Any]) -> None:
        """Handle the start of an iteration over a sampler."""

    def end_epoch(self, sampler: DistributedSampler[Any]) -> None:
        """Handle the end of an iteration over a sampler, or its abandonment."""

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


def _find_caller() -> FrameType | None:
    """Return the frame that called the hook of a module, without our wrapper of the hook."""
    frames = _list_frames(sys._getframe(2))
    return next((each for each in frames if each.f_globals.get("__name__") != unseen.__module__), None)


def find_site() -> str:
    """Return file:line of the script's code that called into torch, or an empty string."""
    frames = _list_frames(sys._getframe(1))
    outer = next((each for each in frames if not is_inner_file(each.f_code.co_filename)), None)
    return "" if outer is None else describe_frame(outer)


def describe_frame(frame: FrameType) -> str:
    """Return the file:line that a frame executes; in a library, its package and the script's line too.

    For example `accelerate/optimizer.py:186 from train.py:52`.
    """
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    package = _find_package(frame)
    if not package:
        return place
    callers = (each for each in _list_frames(frame.f_back) if not is_inner_file(each.f_code.co_filename))
    caller = next((each for each in callers if not _find_package(each)), None)
    origin = "" if caller is None else f" from {Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    return f"{package}/{place}{origin}"


def _find_package(frame: FrameType) -> str:
    """Return the installed package of a frame's file, or an empty string for a script."""
    folders = Path(frame.f_code.co_filename).parts[:-1]
    at = next((number for number, each in enumerate(folders) if each in _INSTALLED), len(folders))
    return "".join(folders[at + 1 : at + 2])


def find_scale(scaler: object) -> float | None:
    """Return the loss scale that gradients have before a call of a scaler, or None if they have none.

    A subclass such as FSDP's unscales by a method of its own, which only shows in the scaler's state.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        return None
    states = scaler._per_optimizer_states.values()
    is_unscaled = any(state["stage"] is OptState.UNSCALED for state in states)
    return None if is_unscaled else float(scaler.get_scale())


def find_enclosing_step(optimizer: Optimizer) -> Optimizer | None:
    """Return the outermost optimizer with all parameters of this one whose running `step` called its `step`.

    ZeroRedundancyOptimizer, for example, steps an optimizer of this rank's share. A subclass may call the
    `step` of its base class: the result is `optimizer` itself whenever one of its steps encloses this one.
    Call it from a hook of a step.
    """
    own = _list_parameters(optimizer)
    found: Optimizer | None = None
    steps = (frame for frame in _list_frames(sys._getframe(1)) if frame.f_code.co_qualname == _STEP)
    for frame in islice(steps, 1, None):  # the first is the step of this hook
        outer = frame.f_locals.get("self")
        if isinstance(outer, Optimizer) and own <= _list_parameters(outer):
            found = outer
        if found is optimizer:
            break
    return found


def _list_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _list_parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def is_inner_file(file: str) -> bool:
    """Return whether code of this file is not the script's: torch, its decorators, this package, or generated."""
    return file.startswith((_OURS, _TORCH, "<")) or file.endswith(DECORATORS)


def to_float(value: Any) -> float:
    """Return a number, or a tensor of one element, as a float.

    For a DTensor this is a collective: all ranks of its mesh must call it.
    """
    return float(value.full_tensor()) if hasattr(value, "full_tensor") else float(value)


def find_bypassed(module: nn.Module) -> nn.Module | None:
    """Return the outermost other module that contains `module` and whose `forward` is running, if any.

    Call it from a hook of a module that no other hooked call encloses: an enclosing `forward` was then
    called directly.
    """
    found: nn.Module | None = None
    for frame in _list_frames(sys._getframe(1)):
        if frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner is not module and _contains(owner, module):
                found = owner
    return found


def _contains(owner: nn.Module, module: nn.Module) -> bool:
    return any(each is module for each in owner.modules())

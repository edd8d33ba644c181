"""What a module does when it is replayed: its steps, the modules that it calls, the attributes that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moeverify.diagnose.own.replay import Plant, Replay
from moeverify.diagnose.own.steps import Step, StepMode

_MOST_STEPS = 4000


@dataclass(frozen=True)
class Child:
    """A module that was called inside of another, by its name there, and what it took first and returned first."""

    name: str
    module: nn.Module
    taken: Tensor | None
    made: Tensor | None


@dataclass
class Trace:
    """What one run did. `read` has the names of the attributes that were read, by the identity of their owner.

    `output` is what the run has read; `names` are those of modules inside of the one that was called.
    """

    output: Tensor
    steps: list[Step]
    children: dict[str, Child] = field(default_factory=dict)
    read: dict[int, dict[str, None]] = field(default_factory=dict)
    owners: dict[int, object] = field(default_factory=dict)


def trace_run(replay: Replay, plant: Plant | None = None, number: float = 0.0) -> Trace | None:
    """Return what a run does, as it is or with a mistake; None where it fails, or takes too many steps."""
    mode = StepMode(keeps=True)
    trace = Trace(output=None, steps=mode.steps)  # type: ignore[arg-type]  # it is known after the run
    with ExitStack() as stack:
        for name, module in replay.call.module.named_modules():
            enter, leave = partial(_enter, mode, name), partial(_leave, mode, trace, name)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(_watch_attributes(replay.call.module, trace))
        output = replay.run(plant, number, mode=mode)
    if output is None or len(mode.steps) > _MOST_STEPS:
        return None
    trace.output = output
    return trace


def _enter(mode: StepMode, name: str, module: nn.Module, args: Any) -> None:
    mode.inside.append(name)


def _leave(mode: StepMode, trace: Trace, name: str, module: nn.Module, args: Any, output: Any) -> None:
    mode.inside.pop()
    if name not in trace.children:
        with torch._C.DisableTorchFunction():  # what is copied here is no step of the module
            trace.children[name] = Child(name, module, _first_tensor(args), _first_tensor(output))


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return next((found for item in value if (found := _first_tensor(item)) is not None), None)
    return None


@contextmanager
def _watch_attributes(module: nn.Module, trace: Trace) -> Iterator[None]:
    """Note which attributes of modules, and of the configurations that they have, are read."""
    owners: dict[int, object] = {}
    for each in module.modules():
        owners[id(each)] = each
        config = vars(each).get("config")
        if config is not None and hasattr(config, "__dict__"):
            owners[id(config)] = config
    trace.owners = owners
    with ExitStack() as stack:
        for cls in {type(owner) for owner in owners.values()}:
            _wrap_reads(cls, trace.read, owners, stack)
        yield


def _wrap_reads(
    cls: type, read: dict[int, dict[str, None]], owners: Mapping[int, object], stack: ExitStack
) -> None:
    original: Any = cls.__getattribute__

    def note(self: object, name: str) -> Any:
        if id(self) in owners:
            read.setdefault(id(self), {})[name] = None
        return original(self, name)

    had_own = "__getattribute__" in vars(cls)
    try:
        cls.__getattribute__ = note  # type: ignore[method-assign, assignment]
    except TypeError:
        return  # of a class in C nothing is noted
    if had_own:
        stack.callback(setattr, cls, "__getattribute__", original)
    else:
        stack.callback(delattr, cls, "__getattribute__")

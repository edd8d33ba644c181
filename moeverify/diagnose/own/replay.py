"""Runs a user's own module again, as it is or with one mistake, and reads what the search for an origin has read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moeverify.diagnose.own.calls import Call, copy_values
from moeverify.diagnose.own.steps import Change, StepMode
from moeverify.results.observation import Direction, End
from moeverify.results.own_module import Mistake
from moeverify.train.module_taps import BACKWARD, FORWARD, list_floats


@dataclass(frozen=True)
class ReadingPlace:
    """What is read: a tensor at one end of a module, or its gradient. `module` is None for what was called itself."""

    direction: Direction
    module: nn.Module | None
    end: End
    slot: str


@dataclass
class Stage:
    """One run of a call, before it begins: a mistake may change all of it. `undo` puts things back afterwards.

    `added` is a tensor that is added to what is read, so many times.
    """

    call: Call
    args: list[Any]
    named: dict[str, Any]
    undo: ExitStack
    changes: dict[int, Change] = field(default_factory=dict)
    added: tuple[Tensor, float] | None = None

    def set_attribute(self, owner: object, name: str, value: object) -> None:
        """Give an object another attribute until the run is over."""
        before = getattr(owner, name)
        self.undo.callback(setattr, owner, name, before)
        setattr(owner, name, value)

    def set_values(self, tensor: Tensor, values: Tensor) -> None:
        """Give a parameter or buffer other values until the run is over."""
        before = tensor.detach().clone()

        def put(new: Tensor) -> None:
            with torch.no_grad():
                tensor.copy_(new)

        self.undo.callback(put, before)
        put(values)


Plant = Callable[[Stage, float], None]


@dataclass(frozen=True)
class Candidate:
    """A mistake, and how it is made. With a `start` the number is looked for from there."""

    mistake: Mistake
    plant: Plant
    start: float | None = None


class _HasReadError(Exception):
    """What was asked for has been read: the rest of the module need not run."""


class Replay:
    """Runs a call again. `watch` is called with the mode of each run, which sees its steps."""

    def __init__(self, call: Call, place: ReadingPlace) -> None:
        self.call = call
        self.place = place
        self.num_runs = 0

    def run(
        self, plant: Plant | None = None, number: float = 0.0, *, mode: StepMode | None = None
    ) -> Tensor | None:
        """Return what is read, float64; None where the module fails so, or never gets there."""
        self.num_runs += 1
        mode = mode or StepMode()
        with ExitStack() as stack:
            # A mistake in the order of things of this run may not change the random numbers of the next.
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(0)
            try:
                stage = Stage(
                    self.call, list(copy_values(self.call.args)), copy_values(dict(self.call.named)), stack
                )
                if plant is not None:
                    plant(stage, number)
                # Behind the hooks of a mistake, so that it reads what these make.
                reader = _Reader(self.place, self.call, stack)
                mode.begin(stage.changes)
                stack.enter_context(self.call.surround())
                stack.enter_context(mode)
                self._compute(stage, reader)
            except Exception:  # where it is not as it was written, a user's module may fail in any way
                return None
            found = reader.found()
            added = stage.added
        if found is None:
            return None
        values = found.detach().to("cpu", torch.float64)
        return values if added is None else values + added[1] * added[0].reshape(values.shape)

    def _compute(self, stage: Stage, reader: _Reader) -> None:
        is_forward = self.place.direction == FORWARD
        with torch.set_grad_enabled(not is_forward), suppress(_HasReadError):
            output = self.call.module(*stage.args, **stage.named)
            if is_forward:
                return
            outputs = dict(list_floats(output))
            wanted = [
                (tensor, self.call.gradients[slot])
                for slot, tensor in outputs.items()
                if slot in self.call.gradients and tensor.requires_grad
            ]
            torch.autograd.backward([each for each, _ in wanted], [gradient for _, gradient in wanted])


class _Reader:
    """Reads one tensor of a run, or its gradient."""

    def __init__(self, place: ReadingPlace, call: Call, stack: ExitStack) -> None:
        self._place = place
        self._tensor: Tensor | None = None
        self._gradient: Tensor | None = None
        module = place.module or call.module
        if place.end == "input":
            handle = module.register_forward_pre_hook(self._enter, with_kwargs=True)
        else:
            handle = module.register_forward_hook(self._leave)
        stack.callback(handle.remove)

    def found(self) -> Tensor | None:
        """Return what was read: a gradient that never came is zero."""
        if self._place.direction == FORWARD or self._tensor is None:
            return self._tensor
        return torch.zeros_like(self._tensor) if self._gradient is None else self._gradient

    def _enter(self, module: nn.Module, args: Any, named: Mapping[str, Any]) -> None:
        self._take(dict(enumerate(args)) | dict(named))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._take(output)

    def _take(self, value: Any) -> None:
        if self._tensor is not None:
            return
        tensor = dict(list_floats(value)).get(self._place.slot)
        if tensor is None:
            return
        with torch._C.DisableTorchFunction():  # what is copied here is no step of the module
            self._read(tensor)

    def _read(self, tensor: Tensor) -> None:
        if self._place.direction == BACKWARD:
            self._tensor = tensor
            if tensor.requires_grad:
                tensor.register_hook(partial(self._keep))  # type: ignore[no-untyped-call]
            return
        self._tensor = tensor.detach().clone()
        raise _HasReadError

    def _keep(self, gradient: Tensor) -> None:
        self._gradient = gradient.detach().clone()

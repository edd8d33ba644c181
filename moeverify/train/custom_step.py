"""A user's own `train_step` in place of the loop's forward and backward passes, clip and optimizer step.

It runs on one device for the golden and on every rank of a layout, and nothing in it is replaced. What the loop shows
of a step is taken from torch's own hooks: the gradients when the optimizer begins its step, the norm when a clip of
torch returns it. Gradients are shown as they were before the clip, so that a wrong norm is seen as one wrong norm and
not as a wrong gradient of every parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moeverify.calls.call import Call
from moeverify.calls.hooks import install
from moeverify.calls.listener import Listener, find_site, to_float
from moeverify.case.suggest import suggest
from moeverify.errors import CaseError, Problem
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.placement import local_part
from moeverify.train.clipping import clip_coefficient
from moeverify.train.target import describe_error, resolve

PATH = "recipe.step"
POSITIONAL = ("model", "optimizer", "micro_batches")
OFFERED = ("scheduler", "mesh", "clip_norm", "num_valid", "finish")
REPORTED = ("loss", "gradient_norm", "clip_coefficient")

MicroBatches = Sequence[tuple[Tensor, Tensor]]


@dataclass
class StepTrace:
    """What one training step of a user's function did on this rank.

    `gradients` and `weights` are copies of each shard at the optimizer's step: gradients divided by the coefficients
    of torch's clips, weights before the update. `reported` are the numbers that the function returned, and
    the norm and the coefficient of the clip where it called torch's once. Shapes: those of the shards; ().
    """

    gradients: list[Tensor | None] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    reported: dict[str, Tensor] = field(default_factory=dict)


class CustomStep:
    """The function that a recipe names as its `step`, ready to be called on this rank.

    `mesh` is that of the layout, None on a single device; `finish` completes the gradients of a step, where
    the user's `parallelize` has returned such a function. `calls` has what each step called, by its number, and
    `rates` the learning rate of each parameter, by its id, when the optimizer began its last step.

    Raises: CaseError where there is no such function, or it cannot be called as it will be.
    """

    def __init__(
        self, target: str, *, mesh: DeviceMesh | None = None, finish: Callable[[], object] | None = None
    ) -> None:
        self.target = target
        self.calls: dict[int, tuple[Call, ...]] = {}
        self.rates: dict[int, float] = {}
        self._function = resolve(target, PATH)
        self._mesh = mesh
        self._finish = finish
        self._takes = _read_parameters(self._function, target)
        if finish is not None and "finish" not in self._takes:
            message = (
                f"`parallelize` returned a function that completes gradients; `{target}` takes no `finish`"
            )
            remedy = (
                "give it a parameter `finish`, called after the last backward pass, or return the model alone"
            )
            raise _refuse(message, remedy)

    @property
    def steps_schedule(self) -> bool:
        """Return whether the function steps the scheduler by itself."""
        return "scheduler" in self._takes

    def run(
        self,
        number: int,
        model: nn.Module,
        optimizer: Optimizer,
        shards: Sequence[LocalShard],
        micro_batches: MicroBatches,
        **offered: Any,
    ) -> StepTrace:
        """Call the function for the step of this number and return what it did.

        Collective: all ranks of the layout.

        Raises: CaseError where the function fails, steps the optimizer more or less than once, or returns what it
        should not.
        """
        listener = _StepListener(number, optimizer, shards)
        offered |= {"mesh": self._mesh, "finish": self._finish or _nothing}
        named = {name: value for name, value in offered.items() if name in self._takes}
        hooks = install(listener)
        try:
            listener.on_model()
            returned = self._function(model, optimizer, micro_batches, **named)
        except CaseError:
            raise
        except Exception as error:
            raise _refuse(f"`{self.target}` failed: {describe_error(error)}") from error
        finally:
            hooks.remove()
            self.calls[number], self.rates = tuple(listener.calls), listener.rates
        self._check_steps(listener.num_steps, len(micro_batches), listener.calls)
        trace = listener.read_trace()
        reported = _read_reported(returned, self.target, shards)
        if "clip_coefficient" in reported and not listener.has_clipped:
            trace.gradients = [_divide(each, reported["clip_coefficient"]) for each in trace.gradients]
        trace.reported |= reported
        return trace

    def _check_steps(self, num_steps: int, num_micro_batches: int, calls: Sequence[Call]) -> None:
        if num_steps == 1:
            return
        sites = dict.fromkeys(call.site for call in calls if call.name == "optimizer step")
        where = f" at {', '.join(sites)}" if sites else ""
        message = (
            f"`{self.target}` stepped the optimizer {num_steps} times{where} in one training step of "
            f"{num_micro_batches} micro-batch{'es' if num_micro_batches != 1 else ''}"
        )
        raise _refuse(
            message, "call optimizer.step() once, of the optimizer that it is given, after the last backward"
        )


class _StepListener(Listener):
    """Keeps the calls of one step, and what its optimizer gets."""

    def __init__(self, number: int, optimizer: Optimizer, shards: Sequence[LocalShard]) -> None:
        super().__init__()
        self._number = number
        self.calls: list[Call] = []
        self.num_steps = 0
        self.rates: dict[int, float] = {}
        self._optimizer = optimizer
        self._shards = shards
        self._trace = StepTrace()
        self._kept = 0.0
        self._clipped: list[Tensor] = []
        self._clips: list[tuple[list[int], Tensor, Tensor]] = []  # ids of parameters, norm, coefficient

    def note_call(self, label: str) -> None:
        """Keep a call; see `Listener`."""
        self._add(label)

    def before_backward(self) -> None:
        """Keep how large the gradients are that the first backward pass adds to; see `Listener`."""
        if not any(call.name == "backward" for call in self.calls):
            self._kept = self._measure_gradients()

    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """Keep the call; see `Listener`."""
        self._add("backward", kept=self._kept)
        self._kept = 0.0

    def before_zero_grad(self) -> None:
        """Keep the call, with the norm of the gradients that it throws away; see `Listener`."""
        self._add("zero_grad", discarded=self._measure_gradients())

    def before_clip(self, label: str, parameters: object) -> None:
        """Keep which parameters are clipped; see `Listener`."""
        if isinstance(parameters, Tensor):
            self._clipped = [parameters]
        elif isinstance(parameters, nn.Module):
            self._clipped = list(parameters.parameters())
        else:
            self._clipped = list(parameters) if isinstance(parameters, Iterable) else []

    def after_clip(self, label: str, norm: object, limit: object) -> None:
        """Keep the norm and the coefficient that torch makes of it; see `Listener`."""
        self._add(label)
        if norm is None or limit is None:
            return  # a clip by value has no coefficient
        total = _as_scalar(norm)
        self._clips.append(
            ([id(each) for each in self._clipped], total, clip_coefficient(total, to_float(limit)))
        )

    def before_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Keep what the optimizer gets; see `Listener`."""
        if optimizer is not self._optimizer:
            return
        self._add("optimizer step")
        self.num_steps += 1
        if self.num_steps == 1:
            self.rates = list_parameter_rates(optimizer)
            with torch.no_grad():
                self._trace.weights = [shard.local().clone() for shard in self._shards]
                self._trace.gradients = [self._copy_gradient(shard) for shard in self._shards]

    @property
    def has_clipped(self) -> bool:
        """Return whether torch has clipped by a norm."""
        return bool(self._clips)

    def read_trace(self) -> StepTrace:
        """Return what was kept, with the norm and the coefficient of the one clip, if it was one."""
        if len(self._clips) == 1:
            _, norm, coefficient = self._clips[0]
            self._trace.reported = {"gradient_norm": norm, "clip_coefficient": coefficient}
        return self._trace

    def _copy_gradient(self, shard: LocalShard) -> Tensor | None:
        """Return this rank's values of a gradient as it was before the clips."""
        gradient = shard.tensor.grad
        if gradient is None:
            return None
        if isinstance(gradient, DTensor) and isinstance(shard.tensor, DTensor):
            # The optimizer's arithmetic places it as the parameter, whatever came out of the backward pass.
            gradient = gradient.redistribute(placements=shard.tensor.placements)
        local: Tensor | None = shard.local(gradient).clone()
        for members, _, coefficient in self._clips:
            if id(shard.tensor) in members:
                local = _divide(local, coefficient)
        return local

    def _measure_gradients(self) -> float:
        """Return the norm of what this rank has of all gradients."""
        found = [shard.tensor.grad for shard in self._shards if shard.tensor.grad is not None]
        squares = [local_part(each).detach().to(torch.float64).square().sum() for each in found]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def _add(self, name: str, *, discarded: float = 0.0, kept: float = 0.0) -> None:
        call = Call(step=self._number, name=name, site=find_site(), discarded=discarded, kept=kept)
        self.calls.append(call)


def list_parameter_rates(optimizer: Optimizer) -> dict[int, float]:
    """Return the learning rate that an optimizer has for each of its parameters, by the id of that."""
    return {id(tensor): float(group["lr"]) for group in optimizer.param_groups for tensor in group["params"]}


def _nothing() -> None:
    """Complete no gradients: on one device, and under wrappers that do it by themselves, they are complete."""


def _divide(gradient: Tensor | None, coefficient: Tensor) -> Tensor | None:
    """Return a gradient as it was before it was multiplied by a coefficient; 0 takes all that it was."""
    factor = float(coefficient)
    return gradient if gradient is None or factor in (0.0, 1.0) else gradient / factor


def _read_parameters(function: Callable[..., Any], target: str) -> frozenset[str]:
    """Return which of the values that are offered a function takes.

    Raises: CaseError where it cannot be called as `function(model, optimizer, micro_batches)`.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return frozenset()
    parameters = signature.parameters.values()
    takes = frozenset(each.name for each in parameters if each.name in OFFERED)
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        takes = frozenset(OFFERED)
    try:
        signature.bind(*POSITIONAL, **dict.fromkeys(takes))
    except TypeError as error:
        message = f"`{target}{signature}` cannot be called as step({', '.join(POSITIONAL)}): {error}"
        remedy = f"take these three, and of {', '.join(OFFERED)} what you need, by name"
        raise _refuse(message, remedy) from None
    return takes


def _read_reported(returned: object, target: str, shards: Sequence[LocalShard]) -> dict[str, Tensor]:
    """Return the numbers that a step has returned, by name.

    Raises: CaseError where it returned something else than nothing or a mapping of known names to numbers.
    """
    if returned is None:
        return {}
    remedy = f"return nothing, or a dict with any of {', '.join(REPORTED)}, all of the global batch"
    if not isinstance(returned, Mapping):
        raise _refuse(f"`{target}` returned {type(returned).__name__}", remedy)
    unknown = [str(name) for name in returned if name not in REPORTED]
    if unknown:
        hint = suggest(unknown[0], REPORTED)
        raise _refuse(
            f"`{target}` returned `{'`, `'.join(unknown)}`", f"{hint}; {remedy}" if hint else remedy
        )
    found: dict[str, Tensor] = {}
    for name, value in returned.items():
        if isinstance(value, bool) or not isinstance(value, int | float | Tensor) or _count(value) != 1:
            raise _refuse(
                f"`{target}` returned {type(value).__name__} as `{name}`, which is no number", remedy
            )
        device = shards[0].local().device if shards else torch.device("cpu")
        found[str(name)] = _as_scalar(value).to(device)
    return found


def _count(value: float | Tensor) -> int:
    return value.numel() if isinstance(value, Tensor) else 1


def _as_scalar(value: Any) -> Tensor:
    """Return a number as a tensor (). Collective for a DTensor: all ranks of its mesh."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().reshape(())
    return torch.tensor(float(value), dtype=torch.float64)


def _refuse(message: str, remedy: str = "") -> CaseError:
    return CaseError([Problem(message, path=PATH, remedy=remedy)])

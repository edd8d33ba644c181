"""A user's own `train_step` that replaces the loop's forward and backward passes, clip and optimizer step.

It runs on one device for the golden and on every rank of a layout, and nothing in it is replaced. The
values that the loop reports come from torch's hooks. These read gradients when the optimizer begins its
step, and the norm when torch's clip returns it. Gradients are reported as they were before the clip. A
wrong norm is then one wrong number, and not a wrong gradient of every parameter.
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

from moeverify.cases.suggest import suggest
from moeverify.errors import CaseError, Problem
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.placement import local_part
from moeverify.train.calls.call import LoopCall
from moeverify.train.calls.hooks import install
from moeverify.train.calls.listener import Listener, find_site, to_float
from moeverify.train.clipping import clip_coefficient
from moeverify.train.target import describe_error, resolve

PATH = "recipe.step"
POSITIONAL = ("model", "optimizer", "micro_batches")
OFFERED = ("scheduler", "mesh", "clip_norm", "num_valid", "finish")
REPORTED = ("loss", "gradient_norm", "clip_coefficient")

MicroBatches = Sequence[tuple[Tensor, Tensor]]


@dataclass
class StepTrace:
    """A record of one training step of a user's function on this rank.

    `gradients` and `weights` are copies of the local shards when the optimizer steps. The gradients are
    divided by the coefficients of torch's clips; the weights are those before the update. `reported` has
    scalars (): the numbers that the function returned, and the norm and coefficient of torch's clip if it
    was called exactly once.
    """

    gradients: list[Tensor | None] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    reported: dict[str, Tensor] = field(default_factory=dict)


class CustomStep:
    """The function that a recipe names as its `step`, ready to be called on this rank.

    `mesh` is the layout's mesh, None on a single device. `finish` completes the gradients of a step, if the
    user's `parallelize` returned such a function. `calls` maps a step number to the calls of that step.
    `rates` maps the id of each parameter to its learning rate when the optimizer began its last step.

    Raises: CaseError when the function does not exist or does not accept the arguments.
    """

    def __init__(
        self, target: str, *, mesh: DeviceMesh | None = None, finish: Callable[[], object] | None = None
    ) -> None:
        self.target = target
        self.calls: dict[int, tuple[LoopCall, ...]] = {}
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
        """Return whether the function steps the scheduler itself."""
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
        """Call the function for step `number` and return a record of the step.

        `offered` are the optional arguments; the function gets those that it takes. Collective: all ranks
        of the layout.

        Raises: CaseError when the function fails, does not step the optimizer exactly once, or returns
        invalid values.
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

    def _check_steps(self, num_steps: int, num_micro_batches: int, calls: Sequence[LoopCall]) -> None:
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
    """A listener that keeps the calls, gradients and weights of one step."""

    def __init__(self, number: int, optimizer: Optimizer, shards: Sequence[LocalShard]) -> None:
        super().__init__()
        self._number = number
        self.calls: list[LoopCall] = []
        self.num_steps = 0
        self.rates: dict[int, float] = {}
        self._optimizer = optimizer
        self._shards = shards
        self._trace = StepTrace()
        self._kept = 0.0
        self._clipped: list[Tensor] = []
        self._clips: list[tuple[list[int], Tensor, Tensor]] = []  # ids of parameters, norm, coefficient

    def note_call(self, label: str, owner: object = None) -> None:
        """Keep a call; see `Listener`."""
        self._add(label)

    def before_backward(self) -> None:
        """Keep the norm of the gradients that the first backward pass adds to; see `Listener`."""
        if not any(call.name == "backward" for call in self.calls):
            self._kept = self._measure_gradients()

    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """Keep the call; see `Listener`."""
        self._add("backward", kept=self._kept)
        self._kept = 0.0

    def before_zero_grad(self) -> None:
        """Keep the call, with the norm of the discarded gradients; see `Listener`."""
        self._add("zero_grad", discarded=self._measure_gradients())

    def before_clip(self, label: str, parameters: object) -> None:
        """Keep the parameters that are clipped; see `Listener`."""
        if isinstance(parameters, Tensor):
            self._clipped = [parameters]
        elif isinstance(parameters, nn.Module):
            self._clipped = list(parameters.parameters())
        else:
            self._clipped = list(parameters) if isinstance(parameters, Iterable) else []

    def after_clip(self, label: str, norm: object, limit: object) -> None:
        """Keep the norm and torch's coefficient for it; see `Listener`."""
        self._add(label)
        if norm is None or limit is None:
            return  # a clip by value has no coefficient
        total = _as_scalar(norm)
        self._clips.append(
            ([id(each) for each in self._clipped], total, clip_coefficient(total, to_float(limit)))
        )

    def before_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Keep gradients, weights and learning rates before the first step; see `Listener`."""
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
        """Return the record of the step, with norm and coefficient if there was exactly one clip."""
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
            # The optimizer uses the parameter's placements, whatever the backward pass returned.
            gradient = gradient.redistribute(placements=shard.tensor.placements)
        local: Tensor | None = shard.local(gradient).clone()
        for members, _, coefficient in self._clips:
            if id(shard.tensor) in members:
                local = _divide(local, coefficient)
        return local

    def _measure_gradients(self) -> float:
        """Return the norm of this rank's local parts of all gradients."""
        found = [shard.tensor.grad for shard in self._shards if shard.tensor.grad is not None]
        squares = [local_part(each).detach().to(torch.float64).square().sum() for each in found]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def _add(self, name: str, *, discarded: float = 0.0, kept: float = 0.0) -> None:
        call = LoopCall(step=self._number, name=name, site=find_site(), discarded=discarded, kept=kept)
        self.calls.append(call)


def list_parameter_rates(optimizer: Optimizer) -> dict[int, float]:
    """Return the learning rate of each parameter of an optimizer by the parameter's id."""
    return {id(tensor): float(group["lr"]) for group in optimizer.param_groups for tensor in group["params"]}


def _nothing() -> None:
    """Do nothing: gradients are complete on one device and under wrappers that complete them."""


def _divide(gradient: Tensor | None, coefficient: Tensor) -> Tensor | None:
    """Return a gradient before its multiplication by a coefficient. A zero coefficient cannot be undone."""
    # As a tensor, the coefficient stays an operand of the recorded division.
    return gradient if gradient is None or float(coefficient) in (0.0, 1.0) else gradient / coefficient


def _read_parameters(function: Callable[..., Any], target: str) -> frozenset[str]:
    """Return the names in `OFFERED` that a function takes.

    Raises: CaseError when it cannot be called as `function(model, optimizer, micro_batches)`.
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
        remedy = f"take these three, and any of {', '.join(OFFERED)} by name"
        raise _refuse(message, remedy) from None
    return takes


def _read_reported(returned: object, target: str, shards: Sequence[LocalShard]) -> dict[str, Tensor]:
    """Return the numbers that a step returned, by name, as tensors ().

    Raises: CaseError when it returned neither None nor a mapping of names in `REPORTED` to numbers.
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

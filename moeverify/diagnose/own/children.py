"""Mistakes around the modules inside of a user's module: one is left out, called twice, or stands for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moeverify.diagnose.own.replay import Candidate, Stage
from moeverify.diagnose.own.trace import Child, Trace
from moeverify.results.own_module import Mistake

_MOST_PAIRS = 40
MODEL = "the model"

Hook = Callable[..., Any]


def list_child_mistakes(trace: Trace, module: str) -> Iterator[Candidate]:
    """Yield what a module would compute if it called those inside of it otherwise."""
    children = sorted(trace.children.values(), key=lambda child: child.name != "")
    for child in children:
        if child.taken is not None and child.made is not None and child.taken.shape == child.made.shape:
            yield _hook(module, child, "left-out", _give_back)
    for child in children:
        yield _hook(module, child, "zero", _give_zeros)
        yield _hook(module, child, "bfloat16", _round)
    for child in _list_inner(trace):
        yield _hook_inputs(module, child, "centered", lambda x, _: x - x.mean(-1, keepdim=True))
    yield from _list_pairs(module, _list_inner(trace))
    for child in children:
        if child.taken is not None and child.made is not None and child.taken.shape == child.made.shape:
            yield _hook(module, child, "twice", _call_again)
    for child in children:
        yield _hook(module, child, "times", _multiply, start=1.0)


def list_detached_children(trace: Trace, module: str) -> Iterator[Candidate]:
    """Yield gradients that do not come back through a module inside."""
    for child in _list_inner(trace):
        yield _hook_inputs(module, child, "input-detached", lambda x, _: x.detach())
        yield _hook(module, child, "detached", lambda m, a, out, _: _map(out, lambda x: x.detach()))


def list_gradient_mistakes(trace: Trace, module: str) -> Iterator[Candidate]:
    """Yield gradients that come back through a module inside multiplied."""
    for child in _list_inner(trace):
        yield _hook_inputs(module, child, "input-gradient", _Scaled.apply, start=1.0)


def _list_inner(trace: Trace) -> list[Child]:
    """Return the modules inside of the one that was called."""
    return [child for name, child in trace.children.items() if name]


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """Return x."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient times the factor."""
        return gradient * ctx.factor, None


scale_gradient: Callable[[Tensor, float], Tensor] = _Scaled.apply


def _name(module: str, child: Child) -> str:
    return ".".join(each for each in (module, child.name) if each) or MODEL


def _hook(module: str, child: Child, way: str, hook: Hook, start: float | None = None) -> Candidate:
    mistake = Mistake(part="child", name=_name(module, child), way=way, module=module)

    def plant(stage: Stage, number: float) -> None:
        handle = child.module.register_forward_hook(lambda m, a, out: hook(m, a, out, number))
        stage.undo.callback(handle.remove)

    return Candidate(mistake, plant, start)


def _hook_inputs(
    module: str, child: Child, way: str, change: Callable[[Tensor, float], Tensor], start: float | None = None
) -> Candidate:
    mistake = Mistake(part="child", name=_name(module, child), way=way, module=module)

    def plant(stage: Stage, number: float) -> None:
        def hook(_: nn.Module, args: Any, named: Any) -> Any:
            return _map(args, partial(_change, change, number)), _map(named, partial(_change, change, number))

        handle = child.module.register_forward_pre_hook(hook, with_kwargs=True)
        stage.undo.callback(handle.remove)

    return Candidate(mistake, plant, start)


def _change(change: Callable[[Tensor, float], Tensor], number: float, x: Tensor) -> Tensor:
    return change(x, number) if x.is_floating_point() else x


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a structure with all of its tensors of numbers changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _map(value[key], change)
    return value


def _first(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with its first tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list) and value:
        return type(value)([_first(value[0], change), *value[1:]])
    return value


def _given(args: Any) -> Tensor:
    found: Tensor = next(each for each in args if isinstance(each, Tensor))
    return found


def _give_back(module: nn.Module, args: Any, output: Any, _: float) -> Any:
    return _first(output, lambda x: _given(args).view_as(x))


def _give_zeros(module: nn.Module, args: Any, output: Any, _: float) -> Any:
    return _first(output, torch.zeros_like)


def _round(module: nn.Module, args: Any, output: Any, _: float) -> Any:
    return _first(output, lambda x: x.to(torch.bfloat16).to(x.dtype))


def _call_again(module: nn.Module, args: Any, output: Any, _: float) -> Any:
    return module.forward(output if isinstance(output, Tensor) else output[0], *args[1:])


def _multiply(module: nn.Module, args: Any, output: Any, number: float) -> Any:
    return _first(output, lambda x: x * number)


def _list_pairs(module: str, children: Sequence[Child]) -> Iterator[Candidate]:
    """Yield modules inside that stand in each other's place: what one returns is used for what the other does."""
    count = 0
    for number, first in enumerate(children):
        for second in children[number + 1 :]:
            is_like = first.made is not None and second.made is not None
            is_like = is_like and first.made.shape == second.made.shape  # type: ignore[union-attr]
            if not is_like or second.name.startswith(f"{first.name}.") or count >= _MOST_PAIRS:
                continue
            if first.name.startswith(f"{second.name}."):
                continue
            count += 1
            mistake = Mistake(
                part="child",
                name=_name(module, first),
                way="exchanged",
                module=module,
                after=_name(module, second),
            )
            yield Candidate(mistake, partial(_exchange, first, second))


def _exchange(first: Child, second: Child, stage: Stage, _: float) -> None:
    for child, other in ((first, second), (second, first)):
        made = other.made
        handle = child.module.register_forward_hook(lambda m, a, out, made=made: _first(out, lambda x: made))
        stage.undo.callback(handle.remove)

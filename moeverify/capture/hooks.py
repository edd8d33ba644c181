"""Where a listener is called: torch's own hooks, and wrappers of the few calls that torch has no hook for.

Optimizer steps and forward passes have global hooks. `backward`, `zero_grad`, clipping, schedulers and the gradient
scaler have none: these functions are wrapped, and call the original with the same arguments.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from moeverify.capture.listener import Listener

Function = Callable[..., Any]


def install(listener: Listener) -> None:
    """Tell a listener of everything in this process."""
    # torch.compile warns of global hooks; these are ours, and the script's output is to stay as it is.
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
    modules = (
        register_module_forward_pre_hook(listener.enter_module),
        register_module_forward_hook(listener.leave_module, always_call=True),
    )
    # A hook costs every module of every step about a microsecond: these go when the last step is recorded.
    listener.on_stop = functools.partial(_remove, modules)
    listener.on_model = functools.partial(_wrap_late, listener)
    register_optimizer_step_pre_hook(listener.before_step)
    register_optimizer_step_post_hook(listener.after_step)
    _wrap(torch.autograd, "backward", _backward(listener))
    _wrap(Optimizer, "zero_grad", _zero_grad(listener))
    _wrap(nn.Module, "zero_grad", _zero_grad(listener))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original = getattr(nn.utils, name)
        wrapped = _clip(listener, name)(original)
        for module in (nn.utils, nn.utils.clip_grad):
            setattr(module, name, wrapped)
    for scheduler in vars(lr_scheduler).values():
        if inspect.isclass(scheduler) and "step" in vars(scheduler):
            _wrap(scheduler, "step", _plain(listener, "scheduler step"))
    for name in ("step", "unscale_"):
        _wrap(torch.amp.GradScaler, name, _plain(listener, f"scaler {name.rstrip('_')}"))


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _wrap_late(listener: Listener) -> None:
    """Wrap what is imported long after torch: FSDP1 clips by a method of its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not hasattr(FullyShardedDataParallel.clip_grad_norm_, "__wrapped__"):
        _wrap(FullyShardedDataParallel, "clip_grad_norm_", _clip(listener, "clip_grad_norm_"))


def _wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _plain(listener: Listener, label: str) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        @functools.wraps(original)
        def call(*values: Any, **named: Any) -> Any:
            # A gradient scaler may be there and do nothing.
            is_idle = isinstance(values[0], torch.amp.GradScaler) and not values[0].is_enabled()
            with listener.nested(label) as is_outermost:
                if is_outermost and not is_idle:  # a scheduler may step others
                    listener.note_call(label)
                return original(*values, **named)

        return call

    return make


def _backward(listener: Listener) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        @functools.wraps(original)
        def backward(tensors: Any, *values: Any, **named: Any) -> None:
            with listener.nested("backward") as is_outermost:
                if is_outermost:
                    listener.before_backward()
                original(tensors, *values, **named)
                if is_outermost:
                    listener.after_backward([tensors] if isinstance(tensors, Tensor) else list(tensors))

        return backward

    return make


def _zero_grad(listener: Listener) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        @functools.wraps(original)
        def zero_grad(owner: Any, *values: Any, **named: Any) -> Any:
            with listener.nested("zero_grad") as is_outermost:
                if is_outermost:
                    listener.before_zero_grad()
                return original(owner, *values, **named)

        return zero_grad

    return make


def _clip(listener: Listener, label: str) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def clip(*values: Any, **named: Any) -> Any:
            given = signature.bind(*values, **named).arguments
            with listener.nested(label) as is_outermost:
                if is_outermost:
                    # A generator would be used up by whoever reads it first.
                    if isinstance(given.get("parameters"), Iterator):
                        given["parameters"] = list(given["parameters"])
                    listener.before_clip(label, given.get("parameters", given.get("self")))
                norm = original(**given)
            if is_outermost:
                listener.after_clip(label, norm, given.get("max_norm"))
            return norm

        return clip

    return make

"""Where the recorder is called: torch's own hooks, and wrappers of the few calls that torch has no hook for.

Optimizer steps and forward passes have global hooks. `backward`, `zero_grad`, clipping, schedulers and the gradient
scaler have none: these functions are wrapped, and call the original with the same arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
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

from moeverify.capture.recorder import Recorder

Function = Callable[..., Any]


def install(recorder: Recorder) -> None:
    """Let a recorder hear of everything in this process."""
    modules = (
        register_module_forward_pre_hook(recorder.enter_module),
        register_module_forward_hook(recorder.leave_module, always_call=True),
    )
    # A hook costs every module of every step about a microsecond: these go when the last step is recorded.
    recorder.on_stop = functools.partial(_remove, modules)
    recorder.on_model = functools.partial(_wrap_late, recorder)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    _wrap(torch.autograd, "backward", _backward(recorder))
    _wrap(Optimizer, "zero_grad", _zero_grad(recorder))
    _wrap(nn.Module, "zero_grad", _zero_grad(recorder))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original = getattr(nn.utils, name)
        wrapped = _clip(recorder, name)(original)
        for module in (nn.utils, nn.utils.clip_grad):
            setattr(module, name, wrapped)
    for scheduler in vars(lr_scheduler).values():
        if inspect.isclass(scheduler) and "step" in vars(scheduler):
            _wrap(scheduler, "step", _plain(recorder, "scheduler step"))
    for name in ("step", "unscale_"):
        _wrap(torch.amp.GradScaler, name, _plain(recorder, f"scaler {name.rstrip('_')}"))


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _wrap_late(recorder: Recorder) -> None:
    """Wrap what is imported long after torch: FSDP1 clips by a method of its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not hasattr(FullyShardedDataParallel.clip_grad_norm_, "__wrapped__"):
        _wrap(FullyShardedDataParallel, "clip_grad_norm_", _clip(recorder, "clip_grad_norm_"))


def _wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _plain(recorder: Recorder, label: str) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        @functools.wraps(original)
        def call(*values: Any, **named: Any) -> Any:
            with recorder.nested(label) as is_outermost:
                if is_outermost:  # a scheduler may step others
                    recorder.note_call(label)
                return original(*values, **named)

        return call

    return make


def _backward(recorder: Recorder) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        @functools.wraps(original)
        def backward(tensors: Any, *values: Any, **named: Any) -> None:
            with recorder.nested("backward") as is_outermost:
                original(tensors, *values, **named)
                if is_outermost:
                    recorder.after_backward([tensors] if isinstance(tensors, Tensor) else list(tensors))

        return backward

    return make


def _zero_grad(recorder: Recorder) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        @functools.wraps(original)
        def zero_grad(owner: Any, *values: Any, **named: Any) -> Any:
            with recorder.nested("zero_grad") as is_outermost:
                if is_outermost:
                    recorder.before_zero_grad()
                return original(owner, *values, **named)

        return zero_grad

    return make


def _clip(recorder: Recorder, label: str) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def clip(*values: Any, **named: Any) -> Any:
            with recorder.nested(label) as is_outermost:
                norm = original(*values, **named)
            if is_outermost:
                limit = signature.bind(*values, **named).arguments.get("max_norm")
                recorder.after_clip(label, norm, limit)
            return norm

        return clip

    return make

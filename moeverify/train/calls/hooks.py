"""Installation of a listener: torch's own hooks, and wrappers of the calls without hooks.

Optimizer steps and forward passes have global hooks. `backward`, `zero_grad`, clipping, schedulers and the
gradient scaler have none. These functions are wrapped; the wrappers call the original with the same
arguments.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
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
from torch.utils.data.distributed import DistributedSampler
from torch.utils.hooks import RemovableHandle

from moeverify.train.calls.listener import Listener
from moeverify.train.calls.options import computing, trace_group

Function = Callable[..., Any]


class Hooks:
    """The hooks and wrappers that `install` has added to torch; `remove` removes them."""

    def __init__(self) -> None:
        self._modules: list[RemovableHandle] = []
        self._optimizers: list[RemovableHandle] = []
        self._wrapped: list[tuple[Any, str, Any]] = []

    def hook_modules(self, *handles: RemovableHandle) -> None:
        """Store handles of module hooks."""
        self._modules += handles

    def hook_optimizers(self, *handles: RemovableHandle) -> None:
        """Store handles of optimizer hooks."""
        self._optimizers += handles

    def wrap(self, owner: Any, name: str, wrapped: Function) -> None:
        """Replace the function `name` of a class or module by a wrapper."""
        self._wrapped.append((owner, name, vars(owner)[name]))
        setattr(owner, name, wrapped)

    def has_wrapped(self, owner: Any, name: str) -> bool:
        """Return whether the function is already wrapped."""
        return any((known, label) == (owner, name) for known, label, _ in self._wrapped)

    def remove_module_hooks(self) -> None:
        """Remove the hooks of modules. Each hook costs about a microsecond per module call."""
        while self._modules:
            self._modules.pop().remove()

    def remove(self) -> None:
        """Remove all hooks and restore the wrapped functions, the last one first."""
        self.remove_module_hooks()
        while self._optimizers:
            self._optimizers.pop().remove()
        while self._wrapped:
            setattr(*self._wrapped.pop())


def install(listener: Listener) -> Hooks:
    """Report all calls of this process to a listener until the returned `Hooks` are removed.

    Wraps functions of torch for the whole process. The warning of torch.compile about global hooks is
    filtered out.
    """
    # torch.compile warns about global hooks. Ours are intended, and the output of the script must not
    # change.
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
    hooks = Hooks()
    hooks.hook_modules(
        register_module_forward_pre_hook(listener.enter_module),
        register_module_forward_hook(listener.leave_module, always_call=True),
    )
    listener.on_stop = hooks.remove_module_hooks
    listener.on_model = functools.partial(_wrap_late, listener, hooks)
    listener.on_bypass = functools.partial(_wrap_forward, listener, hooks)
    hooks.hook_optimizers(
        register_optimizer_step_pre_hook(listener.before_step),
        register_optimizer_step_post_hook(listener.after_step),
    )
    hooks.wrap(Optimizer, "add_param_group", trace_group(Optimizer.add_param_group))
    hooks.wrap(torch.autograd, "backward", _backward(listener)(torch.autograd.backward))
    for owner in (Optimizer, nn.Module):
        hooks.wrap(owner, "zero_grad", _zero_grad(listener)(owner.zero_grad))
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        wrapped = _clip(listener, name)(getattr(nn.utils, name))
        for module in (nn.utils, nn.utils.clip_grad):
            if name in vars(module):
                hooks.wrap(module, name, wrapped)
    # A class may be in the module under several names.
    for scheduler in dict.fromkeys(each for each in vars(lr_scheduler).values() if inspect.isclass(each)):
        if "step" in vars(scheduler):
            step = computing()(vars(scheduler)["step"])
            hooks.wrap(scheduler, "step", _plain(listener, "scheduler step")(step))
    hooks.wrap(DistributedSampler, "__iter__", _epoch(listener)(DistributedSampler.__iter__))
    for name in ("scale", "step", "unscale_"):
        label = f"scaler {name.rstrip('_')}"
        hooks.wrap(torch.amp.GradScaler, name, _plain(listener, label)(getattr(torch.amp.GradScaler, name)))
    return hooks


def _wrap_late(listener: Listener, hooks: Hooks) -> None:
    """Wrap functions of modules that are imported long after torch: FSDP1 has a clip method of its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not hooks.has_wrapped(FullyShardedDataParallel, "clip_grad_norm_"):  # torch wraps it too
        wrapped = _clip(listener, "clip_grad_norm_")(FullyShardedDataParallel.clip_grad_norm_)
        hooks.wrap(FullyShardedDataParallel, "clip_grad_norm_", wrapped)


def _wrap_forward(listener: Listener, hooks: Hooks, module: nn.Module) -> None:
    """Wrap the `forward` of a module's class, which the script calls directly."""
    owner = next(each for each in type(module).__mro__ if "forward" in vars(each))
    if hooks.has_wrapped(owner, "forward"):
        return
    original = vars(owner)["forward"]

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # `find_rows` reads the names `args` and `kwargs` from this frame.
        listener.enter_module(self, args)
        try:
            return original(self, *args, **kwargs)
        finally:
            listener.leave_module(self, args, None)

    hooks.wrap(owner, "forward", forward)


def _plain(listener: Listener, label: str) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        @functools.wraps(original)
        def call(*values: Any, **named: Any) -> Any:
            # A disabled gradient scaler does nothing.
            is_idle = isinstance(values[0], torch.amp.GradScaler) and not values[0].is_enabled()
            # A scheduler may step other schedulers, and a scaler unscales in its step.
            with listener.nested(label.partition(" ")[0]) as is_outermost:
                if is_outermost and not is_idle:
                    listener.note_call(label, values[0])
                return original(*values, **named)

        return call

    return make


def _epoch(listener: Listener) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        @functools.wraps(original)
        def iterate(sampler: DistributedSampler[Any]) -> Iterator[int]:
            listener.begin_epoch(sampler)
            try:
                yield from original(sampler)
            finally:  # the script may leave an epoch before its end
                listener.end_epoch(sampler)

        return iterate

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
                    # The first reader of a generator would exhaust it.
                    if isinstance(given.get("parameters"), Iterator):
                        given["parameters"] = list(given["parameters"])
                    listener.before_clip(label, given.get("parameters", given.get("self")))
                returned = original(**given)
            if is_outermost:
                limit = given.get("max_norm", given.get("clip_value"))
                listener.after_clip(label, given.get("total_norm", returned), limit)
            return returned

        return clip

    return make

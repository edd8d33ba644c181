"""Mixed precision on one device: a model that computes in a narrower dtype than its parameters have."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves


def narrow_model(model: nn.Module, dtype: torch.dtype, ignored: Set[nn.Parameter] = frozenset()) -> None:
    """Run the forward pass of a model, and of any of its modules, on copies of the parameters in `dtype`.

    The copies replace the parameters during a pass only. Outside of it the model is as before: its class,
    attributes, names and parameters. The outermost module that runs makes the copies. They replace the
    parameters again in the backward pass, in which user code may compute with modules. Gradients flow back
    through the copies to the dtype of the parameters. A parameter that is used twice in a pass is copied once,
    so its partial gradients are summed in `dtype`, as with FSDP2. `ignored` parameters, buffers, inputs and
    outputs are unchanged.
    """
    copies = _Copies(dtype, ignored)
    for module in model.modules():
        module.register_forward_pre_hook(copies.enter, prepend=True)
        module.register_forward_hook(copies.leave, always_call=True)


def narrow(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a differentiable copy in `dtype`, or the parameter itself if it is not floating point."""
    return parameter.to(dtype) if parameter.is_floating_point() else parameter


class _Replacement(NamedTuple):
    """A copy of a parameter for the place of the parameter in its module."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter
    copy: Tensor


class _PassReplacements:
    """The replacements of one forward pass and of the backward pass through its outputs."""

    def __init__(self, replacements: Sequence[_Replacement]) -> None:
        self._replacements = replacements
        self._is_backward = False

    def begin(self) -> None:
        """Replace the parameters."""
        for owner, name, _, copy in self._replacements:
            owner._parameters[name] = copy  # type: ignore[assignment]

    def end(self) -> None:
        """Put the parameters back, except where another pass has put its copies."""
        self._is_backward = False
        for owner, name, parameter, copy in self._replacements:
            if owner._parameters.get(name) is copy:
                owner._parameters[name] = parameter

    def begin_backward(self, gradient: Tensor) -> None:
        """Replace the parameters until the backward pass ends."""
        if self._is_backward:
            return  # a module inside of one whose hook has run
        self._is_backward = True
        self.begin()
        Variable._execution_engine.queue_callback(self.end)


class _Copies:
    """The copies of the pass that is running, if there is one."""

    def __init__(self, dtype: torch.dtype, ignored: Set[nn.Parameter]) -> None:
        self._dtype = dtype
        self._ignored = ignored
        self._running: list[nn.Module] = []
        self._pass = _PassReplacements(())

    def enter(self, module: nn.Module, inputs: object) -> None:
        """Replace the parameters of a module, unless a module around it runs."""
        if not self._running:
            self._pass = _PassReplacements(self._make_copies(module))
            self._pass.begin()
        self._running.append(module)

    def leave(self, module: nn.Module, inputs: object, output: object) -> None:
        """Put the parameters back when the outermost module ends."""
        if module not in self._running:
            return
        for part in tree_leaves(output):
            if isinstance(part, Tensor) and part.requires_grad:
                part.register_hook(self._pass.begin_backward)  # type: ignore[no-untyped-call]
        while self._running.pop() is not module:
            pass
        if not self._running:
            self._pass.end()
            self._pass = _PassReplacements(())

    def _make_copies(self, module: nn.Module) -> list[_Replacement]:
        copies: dict[nn.Parameter, Tensor] = {}
        made = []
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is None or parameter in self._ignored or parameter.dtype == self._dtype:
                    continue
                if parameter not in copies:
                    copies[parameter] = narrow(parameter, self._dtype)
                    copies[parameter]._is_param = True
                made.append(_Replacement(owner, name, parameter, copies[parameter]))
        return made

"""What a module of a user's own was called with on one device, and which gradients came back to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moeverify.case.schema import Recipe
from moeverify.diagnose.components import load_weights
from moeverify.golden.store import StoredGolden
from moeverify.train.assemble import assemble_single
from moeverify.train.custom_subject import CustomSubject
from moeverify.train.data import Batch, make_batch, whole_share
from moeverify.train.module_taps import list_floats
from moeverify.train.program import Program

LOSS = "the loss"


@dataclass(frozen=True)
class Call:
    """One call of a module on one device, in float64, with the weights that the step began with.

    `root` is the whole model and `name` that of the module in it: `LOSS` for the model with the loss over it.
    `gradients` are those of what it returned, by slot (`moeverify.train.module_taps.Reading`). `surround` makes
    the context in which it computes. `old` has the parameters of the step before by their names in `root`.
    """

    root: nn.Module
    name: str
    module: nn.Module
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    gradients: Mapping[str, Tensor]
    surround: Callable[[], AbstractContextManager[object]]
    old: Mapping[str, Tensor] = field(default_factory=dict)


class _Loss(nn.Module):
    """A model and the loss over what it returns, as one module that is called with tokens and targets."""

    def __init__(self, program: Program, batch: Batch) -> None:
        super().__init__()
        self.model = program.model
        self._program, self._batch = [program], batch

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, divided by the number of valid tokens of the batch, ()."""
        return _compute_loss(self._program[0], replace(self._batch, tokens=tokens, targets=targets))


class Calls:
    """Records calls of modules in a step, which starts with the golden's weights. No collective."""

    def __init__(self, recipe: Recipe, golden: StoredGolden, step: int, device: torch.device) -> None:
        self._program = program = assemble_single(recipe, device, compute="float64")
        self._old: dict[str, Tensor] = {}
        if step > 0:
            if step > 1:
                load_weights(program, golden, step - 2)
            self._old = {key: each.detach().clone() for key, each in program.model.named_parameters()}
            load_weights(program, golden, step - 1)
        share = whole_share(recipe.data)
        self._batch = make_batch(recipe.data, recipe.model.vocab_size, recipe.seed, step, share, device)

    def record(self, name: str) -> Call | None:
        """Return the first call of a module in the step; None where it is never called."""
        program = self._program
        module = dict(program.model.named_modules()).get(name)
        if module is None:
            return None
        recorder = Recorder(module)
        try:
            with program.subject.surround():
                _compute_loss(program, self._batch).backward()  # type: ignore[no-untyped-call]
        finally:
            recorder.close()
        program.model.zero_grad(set_to_none=True)
        if not recorder.is_called:
            return None
        args, named, gradients = recorder.args, recorder.named, recorder.gradients
        surround = program.subject.surround
        return Call(program.model, name, module, args, named, gradients, surround, self._old)

    def record_loss(self) -> Call:
        """Return the call of the whole model and of the loss over what it returns."""
        program, batch = self._program, self._batch
        loss = _Loss(program, batch)
        one = torch.ones((), dtype=torch.float64, device=program.device)
        args = (batch.tokens, batch.targets)
        return Call(program.model, LOSS, loss, args, {}, {"0": one}, program.subject.surround, self._old)


def _compute_loss(program: Program, batch: Batch) -> Tensor:
    """Return the loss over a batch, divided by the number of its valid tokens, ()."""
    subject = program.subject
    assert isinstance(subject, CustomSubject)
    terms = subject.compute_own_terms(program, batch, batch.targets)
    found: Tensor = torch.stack([term.sum() for term in terms.values()]).sum() / batch.valid.sum()
    return found


def copy_values(value: Any) -> Any:
    """Return the same structure with tensors of its own, leaves of the graph where the originals had gradients."""
    return change_tensors(value, _copy)


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad and tensor.is_floating_point() else copy


def change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same structure with all of its tensors changed; what is no list, tuple or dict stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return _remake(value, {key: change_tensors(item, change) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(change_tensors(item, change) for item in value)
    return value


def _remake(value: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a dict of the class of another: outputs of transformers have their fields as attributes too."""
    if type(value) is dict:
        return items
    try:
        return type(value)(**items)
    except TypeError:
        return items


class Recorder:
    """Keeps the first call of a module, and the gradients of what it returned."""

    def __init__(self, module: nn.Module) -> None:
        self.is_called = False
        self.args: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}
        self.output: Any = None
        self.gradients: dict[str, Tensor] = {}
        self._is_done = False
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any, named: Any) -> None:
        if not self.is_called:
            self.is_called = True
            self.args, self.named = copy_values(tuple(args)), copy_values(dict(named))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._is_done:
            return output
        # What comes back from outside alone: a module may return what it has used itself, as attention's weights.
        self._is_done, self.output = True, change_tensors(output, lambda tensor: tensor.view_as(tensor))
        for slot, tensor in list_floats(self.output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._keep, slot))  # type: ignore[no-untyped-call]
        return self.output

    def _keep(self, slot: str, gradient: Tensor) -> None:
        self.gradients[slot] = gradient.detach().clone()

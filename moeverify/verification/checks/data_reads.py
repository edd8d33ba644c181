"""Batch data that a rank's model and loss read, recorded where it is used, not where it is made.

Tokens are the ids that the embedding looks up. Labels are the targets of torch's cross entropy. Positions
and padding masks are the arguments of the reference model's blocks. Recomputed passes do not count, nor do
passes from which a pipeline learns shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from moeverify.model.transformer import Block
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.passes import is_in_backward, is_trial_pass
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.unseen import unseen
from moeverify.results.data import Batch

Reads = dict[tuple[int, Batch], dict[str, list[Tensor]]]
"""Micro-batches (M, s) in the order of their passes, by (step, kind of data) and reading module."""

MODEL = ""  # the name of the model itself, and of the loss


class DataReads:
    """Hooks on one rank's model and on torch's cross entropy, active until `remove` is called.

    A tensor counts as a micro-batch if it has `num_tokens` elements; it is stored in rows of `length`. An
    embedding with fewer than `vocab_size` rows is a position table, or a shard of a table. Its ids mean
    something else, so it is ignored.
    """

    def __init__(self, model: nn.Module, vocab_size: int, num_tokens: int, length: int) -> None:
        self.step = -1
        self.reads: Reads = {}
        self._num_tokens = num_tokens
        self._length = length
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(
                unseen(self._make_hook(MODEL, Batch.TOKENS, 0, "")), with_kwargs=True
            )
        ]
        firsts: set[str] = set()
        for name, module in model.named_modules():
            stage = name.partition("layers")[0]
            if isinstance(module, nn.Embedding) and module.num_embeddings >= vocab_size:
                self._add(module, name, Batch.TOKENS, 0, "input")
            elif isinstance(module, Block) and stage not in firsts:
                firsts.add(stage)  # all blocks of a stage receive the same arguments
                self._add(module, name, Batch.POSITIONS, 1, "positions")
                self._add(module, name, Batch.MASK, 2, "valid")
        self._original: Callable[..., Any] = functional.cross_entropy
        functional.cross_entropy = self._wrap_loss(self._original)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            functional.cross_entropy = self._original
        self._handles = []

    def _add(self, module: nn.Module, name: str, what: Batch, place: int, argument: str) -> None:
        hook = self._make_hook(logical_name(name), what, place, argument)
        self._handles.append(module.register_forward_pre_hook(unseen(hook), with_kwargs=True))

    def _make_hook(self, name: str, what: Batch, place: int, argument: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling():
                self._keep(name, what, inputs[place] if len(inputs) > place else named.get(argument))

        return hook

    def _wrap_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cross_entropy(input: Tensor, target: Tensor, *rest: Any, **named: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._keep(MODEL, Batch.LABELS, target)
            return original(input, target, *rest, **named)

        return cross_entropy

    @torch.no_grad()
    def _keep(self, name: str, what: Batch, value: Any) -> None:
        if not isinstance(value, Tensor) or value.is_floating_point() or self.step < 0:
            return
        if is_in_backward() or is_trial_pass():
            return
        local = local_part(value)
        if local.numel() == self._num_tokens:
            # A copy, since a loop may refill one buffer for each micro-batch. It is stored in a small dtype
            # because it is kept until the end.
            small = torch.bool if local.dtype is torch.bool else torch.int32
            read = local.detach().reshape(-1, self._length).to(small, copy=True)
            self.reads.setdefault((self.step, what), {}).setdefault(name, []).append(read)

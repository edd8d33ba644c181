"""Activation recomputation: a block's activations are dropped and computed again in the backward pass.

`selective` keeps the outputs of what costs most to compute again, matrix products and attention, and drops the rest:
what torchtitan calls selective activation checkpointing by operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from moeverify.case.schema import Recompute
from moeverify.model.router import Router
from moeverify.model.transformer import Transformer
from moeverify.seams import seam

_ATEN = torch.ops.aten
# Source: pytorch/torchtitan, the list of operations that its selective activation checkpointing saves.
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.bmm.default,
        _ATEN.addmm.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


@seam
def apply_recompute(model: Transformer, which: Recompute) -> None:
    """Wrap every block. Call it before data parallelism, so that gathers are not repeated needlessly."""
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(
            block,
            checkpoint_impl=CheckpointImpl.NO_REENTRANT,
            context_fn=partial(_choose_contexts, block, which),
        )


def _choose_contexts(
    block: nn.Module, which: Recompute
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of a block's forward pass, which begins now, and of its recomputation.

    A pipeline recomputes a micro-batch when others have been through the block in between, so its routers
    must be given again the choice that they replayed.
    """
    routers = [module for module in block.modules() if isinstance(module, Router)]
    replaying = _Replaying([(router, router.replay) for router in routers])
    if which != "selective":
        return nullcontext(), replaying
    forward, again = create_selective_checkpoint_contexts(_choose_policy)  # type: ignore[no-untyped-call]
    return forward, _within(replaying, again)


@contextmanager
def _within(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


def _choose_policy(_: object, operation: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operation in _KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Replaying:
    """A context that may be entered again: a zero-bubble schedule recomputes a block several times."""

    def __init__(self, chosen: Sequence[tuple[Router, Tensor | None]]) -> None:
        self.chosen = chosen
        self.before: list[Tensor | None] = []

    def __enter__(self) -> None:
        self.before = [router.replay for router, _ in self.chosen]
        for router, ids in self.chosen:
            router.replay = ids

    def __exit__(self, *error: object) -> None:
        for (router, _), own in zip(self.chosen, self.before, strict=True):
            router.replay = own

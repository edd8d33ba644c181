"""Activation recomputation: a block's activations are freed and recomputed in the backward pass.

`selective` keeps the outputs that cost most to recompute, matrix products and attention, and frees the
rest. torchtitan calls this selective activation checkpointing per operation.
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

from moeverify.cases.schema import Recompute
from moeverify.model.router import Router
from moeverify.model.transformer import Transformer
from moeverify.seams import seam

_ATEN = torch.ops.aten
# Source: pytorch/torchtitan, the operations that its selective activation checkpointing saves.
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
    """Wrap every block. Call it before data parallelism, so that recomputation does not repeat gathers."""
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

    In a pipeline, other micro-batches pass through the block before this one is recomputed. The
    recomputation must therefore restore the routing choice that the routers replayed.
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
    """A context that restores replayed routing.

    It is reusable, because zero-bubble schedules recompute a block several times.
    """

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

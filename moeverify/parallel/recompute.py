"""Activation recomputation: a block's activations are dropped and computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from moeverify.model.router import Router
from moeverify.model.transformer import Transformer
from moeverify.seams import seam


@seam
def apply_recompute(model: Transformer) -> None:
    """Wrap every block. Call it before data parallelism, so that gathers are not repeated needlessly."""
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(
            block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, context_fn=partial(_choose_contexts, block)
        )


def _choose_contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's forward pass, which begins now, and of its recomputation.

    A pipeline recomputes a micro-batch when others have been through the block in between, so its routers
    must be given again the choice that they replayed.
    """
    routers = [module for module in block.modules() if isinstance(module, Router)]
    return nullcontext(), _Replaying([(router, router.replay) for router in routers])


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

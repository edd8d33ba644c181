"""Activation recomputation: a block's activations are dropped and computed again in the backward pass."""

from __future__ import annotations

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from moeverify.model.transformer import Transformer


def apply_recompute(model: Transformer) -> None:
    """Wrap every block. Call it before data parallelism, so that gathers are not repeated needlessly."""
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)

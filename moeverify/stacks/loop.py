"""Training loop for frameworks that wrap a model and its optimizer together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeverify.cases.schema import Optimizer as OptimizerSpec
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.train.clipping import clip_coefficient
from moeverify.train.engine import PreparedEngine


class FrameworkLoop(PreparedEngine):
    """Backward, norm, clip and step of a framework with gradients in `.grad`. See `moeverify.train.engine`.

    `wrapped` is the wrapped optimizer of the framework. `backward` takes a loss (). `clip_by_norm` clips
    all gradients to a limit and returns the norm before the clip.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        wrapped: Any,
        backward: Callable[[Tensor], object],
        clip_by_norm: Callable[[float], Any],
    ) -> None:
        super().__init__(optimizer)
        self._wrapped = wrapped
        self._backward = backward
        self._clip_by_norm = clip_by_norm
        self._clips = False

    def begin(self, spec: OptimizerSpec, shards: Sequence[LocalShard], kernels: str) -> Optimizer:
        """Return the optimizer as the framework left it.

        Without a clip in the recipe, `norm` returns None.
        """
        self._clips = spec.clip_norm is not None
        return super().begin(spec, shards, kernels)

    def zero_grad(self) -> None:
        """Reset the gradients through the framework."""
        self._wrapped.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Accumulate into `.grad`, with the framework's scaling of the loss."""
        self._backward(loss)

    def norm(self) -> Tensor | None:
        """Return the framework's norm, from a clip to infinity, or None without a clip in the recipe."""
        return _whole(self._clip_by_norm(torch.inf)) if self._clips else None

    def clip(self, shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
        """Clip by the framework's own norm. Return the coefficient of torch's formula for that norm, ()."""
        return clip_coefficient(_whole(self._clip_by_norm(max_norm)), max_norm)

    def step(self) -> None:
        """Perform a step of the wrapped optimizer."""
        self._wrapped.step()


def _whole(norm: Any) -> Tensor:
    tensor: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return tensor

"""The calls that make a training loop in frameworks which take a model and its optimizer together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeverify.case.schema import Optimizer as OptimizerSpec
from moeverify.layout.local_shard import LocalShard
from moeverify.train.clipping import clip_coefficient
from moeverify.train.engine import PreparedEngine


class FrameworkLoop(PreparedEngine):
    """Backward, norm, clip and step as a framework has them; gradients are in `.grad`. See `moeverify.train.engine`.

    `wrapped` is the optimizer as the framework wraps it, `backward` takes a loss (), and `clip_by_norm` clips all
    gradients by a limit and returns the norm that they had before.
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
        """Return the optimizer as the framework left it; a recipe without a clip never asks for a norm."""
        self._clips = spec.clip_norm is not None
        return super().begin(spec, shards, kernels)

    def zero_grad(self) -> None:
        """Let the framework forget the gradients."""
        self._wrapped.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Accumulate into `.grad`, as the framework scales the loss."""
        self._backward(loss)

    def norm(self) -> Tensor | None:
        """Return the norm as the framework measures it, by a clip that no gradient reaches; None without clip."""
        return _whole(self._clip_by_norm(torch.inf)) if self._clips else None

    def clip(self, shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
        """Clip by the framework's own norm, and return the coefficient of torch's formula for it, ()."""
        return clip_coefficient(_whole(self._clip_by_norm(max_norm)), max_norm)

    def step(self) -> None:
        """Take a step of the wrapped optimizer."""
        self._wrapped.step()


def _whole(norm: Any) -> Tensor:
    tensor: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return tensor

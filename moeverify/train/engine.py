"""Engines that carry out the steps of one rank: plain torch, or a framework with its own loop.

In each step the training loop calls `zero_grad`; a forward pass and `backward` for every micro-batch; the
layout's `finalize`; `gradient` of every parameter; `norm` and `clip`; `step`; and `state`. A framework's
engine overrides the methods for the parts that the framework does itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from moeverify.cases.schema import Optimizer
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.train.clipping import clip_gradients
from moeverify.train.optimizer import build_optimizer, optimizer_state


class Engine(Protocol):
    """One rank's optimizer and its gradients.

    Collective: all ranks of the layout call each method.
    """

    def begin(self, spec: Optimizer, shards: Sequence[LocalShard], kernels: str) -> TorchOptimizer:
        """Create and return the optimizer, or one whose parameter groups have the framework's learning rates.

        `kernels` is the layout's `optimizer` option.
        """

    def zero_grad(self) -> None:
        """Discard the gradients of the previous step."""

    def backward(self, loss: Tensor) -> None:
        """Backpropagate a micro-batch's loss (), already multiplied by the layout's factor."""

    def gradient(self, shard: LocalShard) -> Tensor | None:
        """Return the finished gradient of a parameter in local storage; `shard.local` reads it.

        Usually `.grad`; some frameworks use `main_grad` or a flat buffer. None if the parameter has no
        gradient.
        """

    def norm(self) -> Tensor | None:
        """Return the framework's norm of all gradients, shape () and equal on every rank.

        None makes the loop compute the norm from the gradients.
        """

    def clip(self, shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`, and return the coefficient ()."""

    def step(self) -> None:
        """Update the parameters."""

    def state(self, shards: Sequence[LocalShard]) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield (name, local values, region) of every tensor of the optimizer's state."""


class PlainEngine:
    """An engine that uses a torch optimizer on `.grad`; see `Engine`."""

    def __init__(self) -> None:
        self._optimizer: TorchOptimizer | None = None

    @property
    def optimizer(self) -> TorchOptimizer:
        """Return the optimizer. `begin` must have been called."""
        assert self._optimizer is not None
        return self._optimizer

    def begin(self, spec: Optimizer, shards: Sequence[LocalShard], kernels: str) -> TorchOptimizer:
        """Create the recipe's optimizer over the parameters of this rank."""
        self._optimizer = build_optimizer(spec, shards, kernels)
        return self._optimizer

    def zero_grad(self) -> None:
        """Set `.grad` to None. A gradient that never arrives then shows as missing, not as zero."""
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Accumulate into `.grad`."""
        torch.autograd.backward(loss)

    def gradient(self, shard: LocalShard) -> Tensor | None:
        """Return `.grad`."""
        return shard.tensor.grad

    def norm(self) -> Tensor | None:
        """Return None: plain torch has no norm over several meshes."""
        return None

    def clip(self, shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
        """Scale `.grad`."""
        return clip_gradients(shards, norm, max_norm)

    def step(self) -> None:
        """Take a step of the optimizer."""
        self.optimizer.step()

    def state(self, shards: Sequence[LocalShard]) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield moments and step counters."""
        return optimizer_state(self.optimizer, shards)


class PreparedEngine(PlainEngine):
    """An engine for an optimizer that a framework got with the model and may have wrapped or changed."""

    def __init__(self, optimizer: TorchOptimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def begin(self, spec: Optimizer, shards: Sequence[LocalShard], kernels: str) -> TorchOptimizer:
        """Return the optimizer as the framework left it; recipe and layout already determined it."""
        return self.optimizer

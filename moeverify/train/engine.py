"""What carries out the steps of one rank: plain torch, or a framework that owns its loop.

The training loop calls, once in each step: `zero_grad`; for every micro-batch a forward pass and `backward`; the
layout's `finalize`; `gradient` of every parameter; `norm` and `clip`; `step`; and `state`. An engine of a framework
overrides where its gradients are and what it does by itself; the loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from moeverify.case.schema import Optimizer
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.region import Region
from moeverify.train.clipping import clip_gradients
from moeverify.train.optimizer import build_optimizer, optimizer_state


class Engine(Protocol):
    """One rank's optimizer, and the gradients that it works on.

    Collective: all ranks of the layout call each method.
    """

    def begin(self, spec: Optimizer, shards: Sequence[LocalShard], kernels: str) -> TorchOptimizer:
        """Make the optimizer and return it, or one whose parameter groups have the framework's learning rates.

        `kernels` is the layout's `optimizer`.
        """

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's loss (), which is scaled as the layout asks."""

    def gradient(self, shard: LocalShard) -> Tensor | None:
        """Return the finished gradient of a parameter as it is stored here: `shard.local` reads it.

        Usually `.grad`; some frameworks keep it in `main_grad` or a flat buffer. None where none has come.
        """

    def norm(self) -> Tensor | None:
        """Return the norm of all gradients together, () and equal on every rank, as the framework computes it.

        None lets the loop compute it of the gradients.
        """

    def clip(self, shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`, and return the coefficient, ()."""

    def step(self) -> None:
        """Update the parameters."""

    def state(self, shards: Sequence[LocalShard]) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield (name, local values, region) of every tensor of the optimizer's state."""


class PlainEngine:
    """torch.optim on `.grad`; see `Engine`."""

    def __init__(self) -> None:
        self._optimizer: TorchOptimizer | None = None

    @property
    def optimizer(self) -> TorchOptimizer:
        """Return the optimizer; `begin` has made it."""
        assert self._optimizer is not None
        return self._optimizer

    def begin(self, spec: Optimizer, shards: Sequence[LocalShard], kernels: str) -> TorchOptimizer:
        """Make the optimizer of a recipe over the parameters of this rank."""
        self._optimizer = build_optimizer(spec, shards, kernels)
        return self._optimizer

    def zero_grad(self) -> None:
        """Set `.grad` to None, so that a gradient that never comes is seen as missing and not as zero."""
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
    """A torch optimizer that a framework was given together with the model, and may have wrapped or changed."""

    def __init__(self, optimizer: TorchOptimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def begin(self, spec: Optimizer, shards: Sequence[LocalShard], kernels: str) -> TorchOptimizer:
        """Return the optimizer as the framework left it: the recipe and the layout made it what it is."""
        return self.optimizer

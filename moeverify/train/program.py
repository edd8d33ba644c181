"""A model that is ready to train on this rank, and everything that differs between layouts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from moeverify.case.schema import Recipe
from moeverify.layout.bound import BoundTensors, Rebound, take_live
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.region import Region
from moeverify.parallel.holder_groups import HolderGroups
from moeverify.parallel.pipeline import Pipeline
from moeverify.parallel.placed_experts import PlacedExperts
from moeverify.placement.placement import Placement
from moeverify.train.clipping import SumOverShards, gradient_norm, norm_of_regions
from moeverify.train.custom_step import CustomStep
from moeverify.train.data import Batch, Share
from moeverify.train.engine import Engine, PlainEngine
from moeverify.train.objective import Losses, Normalizers, Sums
from moeverify.train.rebalancing import Rebalancing
from moeverify.train.routers import RouterView
from moeverify.train.subject import Subject

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def _nothing() -> None:
    return None


def _no_context(last: bool) -> AbstractContextManager[object]:
    return nullcontext()


class Source(Protocol):
    """Where the state of a run can be read from: a stored golden."""

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        """Return a region of a logical tensor, or None where there is no such tensor."""


@dataclass
class Program:
    """One rank's part of a training run.

    `scale` multiplies the loss before the backward pass: the number of ranks over which the layout averages
    gradients. `accumulate(last)` surrounds the forward and backward of a micro-batch, `finalize` completes the
    gradients after the last one, and the `engine` has the optimizer. `own_router_losses` gives this rank's part of
    balance and z loss where the experts' package computes them. A `pipeline` runs the micro-batches in their place,
    and so does `run_captured`, by graphs. `counted` are the shards whose gradients make the norm, where that is not
    all of them: two stages may hold one tensor. The gradients of `placed` experts, where a placement says where
    experts are, are in the norm beside those; `exchanges` are the placements that they go to, by the number of steps
    after which, which `rebalancing` solves where they are not given, and `holders` the groups of the ranks that hold
    them. `counted_regions` names the parameters that this rank counts where neither meshes nor wrappers say how often
    a value is there. A `custom_step` makes the steps in place of all of this but the model, its shards and the
    optimizer. The defaults are those of a single device.
    """

    subject: Subject
    model: nn.Module
    shards: Sequence[LocalShard]
    buffers: Sequence[LocalShard]
    routers: Sequence[RouterView]
    share: Share
    device: torch.device
    sums: Sums = field(default_factory=Sums)
    scale: float = 1.0
    num_micro_batches: int = 1
    optimizer_implementation: str = "foreach"
    accumulate: Callable[[bool], AbstractContextManager[object]] = _no_context
    loss_context: Callable[[], AbstractContextManager[object]] = nullcontext
    finalize: Callable[[], None] = _nothing
    sum_over_shards: SumOverShards | None = None
    own_router_losses: Callable[[], tuple[Tensor, Tensor]] | None = None
    sum_over_stages: SumOverShards | None = None
    counted: Sequence[LocalShard] | None = None
    placed: Sequence[PlacedExperts] | None = None
    exchanges: Mapping[int, Placement] = field(default_factory=dict)
    rebalancing: Rebalancing | None = None
    holders: HolderGroups | None = None
    counted_regions: Collection[str] | None = None
    pipeline: Pipeline | None = None
    run_captured: RunMicroBatches | None = None
    engine: Engine = field(default_factory=PlainEngine)
    custom_step: CustomStep | None = None

    def __post_init__(self) -> None:
        """Keep which tensors the model has now."""
        self.keep_bound()

    def keep_bound(self) -> None:
        """Keep which tensors the model has now: what is bound to another one later is `find_rebound`'s."""
        self._bound = BoundTensors(self.model)

    def find_rebound(self) -> list[Rebound]:
        """Return the parameters and buffers that a module has bound to another tensor since."""
        return self._bound.find_rebound()

    def live_shards(self) -> Sequence[LocalShard]:
        """Return the shards of the tensors that the modules compute with now.

        `shards` are those that the optimizer has, and a checkpoint saves. Where a framework carries out the steps,
        the tensors of `shards` are its own.
        """
        if not isinstance(self.engine, PlainEngine):
            return self.shards
        return take_live(self.shards, self.find_rebound())

    def live_buffers(self) -> Sequence[LocalShard]:
        """Return the shards of the buffers that the modules have now; `buffers` are those that a checkpoint saves."""
        return take_live(self.buffers, self.find_rebound())

    @property
    def in_norm(self) -> Sequence[LocalShard]:
        """Return the shards whose gradients make the gradient norm."""
        return self.shards if self.counted is None else self.counted

    def measure_norm(self) -> Tensor:
        """Return the norm of all gradients together, (): the engine's own, or else that of what it keeps.

        Collective: all ranks of the layout.
        """
        norm = self.engine.norm()
        if norm is not None:
            return norm
        if self.counted_regions is not None:
            return norm_of_regions(self.engine, self.shards, self.counted_regions)
        norm = gradient_norm(self.in_norm, self.sum_over_shards, self.sum_over_stages)
        if self.placed is None:
            return norm
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for experts in self.placed:
            square += experts.sum_squares()
        square = self.sum_over_stages(square) if self.sum_over_stages else square
        # In the dtype in which most of it was summed: a wider one would promise digits that it has not.
        return (norm.to(torch.float64).square() + square).sqrt().to(norm.dtype)


@dataclass
class StepInputs:
    """What the micro-batches of one step run on, on this rank.

    With `ids` the routers use the routing of a golden.
    """

    recipe: Recipe
    program: Program
    batches: Sequence[Batch]
    normalizers: Normalizers
    step: int
    ids: Source | None = None


@dataclass(frozen=True)
class MicroBatchResult:
    """A micro-batch that has been through the model: this rank's part of the losses, each token's (M, s).

    None where a user's loss does not give them, and on ranks that see only a part of the model's layers.
    """

    batch: Batch
    losses: Losses | None
    token_loss: Tensor | None


RunMicroBatches = Callable[[StepInputs], Iterator[MicroBatchResult]]
"""Runs the micro-batches of a step forward and backward, and yields each while the routers hold its records."""


def dtype_of(precision: str) -> torch.dtype:
    """Return the torch dtype in which a recipe's precision keeps parameters, gradients and optimizer state."""
    return torch.float32 if precision == "mixed" else _DTYPES[precision]


def compute_dtype_of(precision: str) -> torch.dtype:
    """Return the torch dtype of the arithmetic, which only `mixed` has apart from that of the parameters."""
    return torch.bfloat16 if precision == "mixed" else _DTYPES[precision]

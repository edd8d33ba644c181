"""A model ready to train on this rank, with everything that depends on the layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from moeverify.cases.schema import Recipe
from moeverify.parallel.holder_groups import HolderGroups
from moeverify.parallel.pipeline import Pipeline
from moeverify.parallel.placed_experts import PlacedExperts
from moeverify.parallel.regions.bound import BoundTensors, Rebound, take_live
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.tools.placement.placement import Placement
from moeverify.train.clipping import SumOverShards, gradient_norm, norm_of_regions
from moeverify.train.custom_step import CustomStep
from moeverify.train.data import MicroBatch, Share
from moeverify.train.engine import Engine, PlainEngine
from moeverify.train.objective import GroupSums, Losses, Normalizers
from moeverify.train.rebalancing import Rebalancing
from moeverify.train.routers import RouterView
from moeverify.train.subject import TestedModel

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def _nothing() -> None:
    return None


def _no_context(last: bool) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class NearTieCounts:
    """The rows of choices near a tie in this rank's run.

    A golden has changed `num_changed` of them. It has no row near `num_free` of them, which rounding may flip.
    """

    num_rows: int = 0
    num_changed: int = 0
    num_free: int = 0


class ReadableState(Protocol):
    """A readable state of a run, such as a stored golden."""

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        """Return a region (`region.local_shape`) of a logical tensor, or None if the tensor does not exist."""

    def find(self, step: int, kind: str, name: str) -> Tensor | None:
        """Return a whole tensor of any shape, or None if it does not exist."""


@dataclass
class TrainingProgram:
    """One rank's part of a training run. The defaults describe a single device.

    - `scale`: factor of the loss before the backward pass, the number of ranks over which gradients are
      averaged.
    - `accumulate(last)`: context around the forward and backward pass of a micro-batch.
    - `finalize`: completes the gradients after the last micro-batch.
    - `engine`: holds the optimizer and carries out the steps.
    - `own_router_losses`: this rank's balance and z loss, if the experts' package computes them.
    - `pipeline`, `run_captured`: alternative runners of the micro-batches, by a pipeline schedule or by
      CUDA graphs.
    - `counted`: the shards in the gradient norm, if not all: two stages may hold one tensor.
    - `placed`: experts of an explicit placement. Their gradients are added to the norm.
    - `exchanges`: expert placements by the number of steps after which they take effect.
    - `rebalancing`: computes such placements during training.
    - `holders`: process groups of the ranks that hold each expert.
    - `counted_regions`: parameters that this rank counts in the norm, where neither meshes nor wrappers
      show how many ranks hold a value.
    - `near_ties`: counts of the choices that were held (`moeverify.train.near_ties`).
    - `custom_step`: a user's step. It uses only the model, its shards and the optimizer of this program.
    """

    subject: TestedModel
    model: nn.Module
    shards: Sequence[LocalShard]
    buffers: Sequence[LocalShard]
    routers: Sequence[RouterView]
    share: Share
    device: torch.device
    sums: GroupSums = field(default_factory=GroupSums)
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
    near_ties: NearTieCounts = field(default_factory=NearTieCounts)
    custom_step: CustomStep | None = None

    def __post_init__(self) -> None:
        """Record the tensors that the model has now."""
        self.keep_bound()

    def keep_bound(self) -> None:
        """Record the tensors that the model has now; `find_rebound` reports later replacements."""
        self._bound = BoundTensors(self.model)

    def find_rebound(self) -> list[Rebound]:
        """Return the parameters and buffers that a module has replaced since `keep_bound`."""
        return self._bound.find_rebound()

    def live_shards(self) -> Sequence[LocalShard]:
        """Return the shards of the tensors that the modules compute with now.

        `shards` are the tensors of the optimizer and of checkpoints. Where a framework carries out the
        steps, it owns the tensors of `shards`.
        """
        if not isinstance(self.engine, PlainEngine):
            return self.shards
        return take_live(self.shards, self.find_rebound())

    def live_buffers(self) -> Sequence[LocalShard]:
        """Return the shards of the modules' current buffers; checkpoints save those in `buffers`."""
        return take_live(self.buffers, self.find_rebound())

    @property
    def in_norm(self) -> Sequence[LocalShard]:
        """Return the shards whose gradients form the gradient norm."""
        return self.shards if self.counted is None else self.counted

    def measure_norm(self) -> Tensor:
        """Return the norm () of all gradients, from the engine or else from the gradients.

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
        # Keep the dtype of most of the sums: a wider dtype would suggest digits that are not there.
        return (norm.to(torch.float64).square() + square).sqrt().to(norm.dtype)


@dataclass
class StepInputs:
    """Inputs of one step's micro-batches on this rank.

    Routers replay the routing of `ids`, if given. `near_ties` is a context around each pass of a user's model.
    """

    recipe: Recipe
    program: TrainingProgram
    batches: Sequence[MicroBatch]
    normalizers: Normalizers
    step: int
    ids: ReadableState | None = None
    near_ties: AbstractContextManager[object] | None = None


@dataclass(frozen=True)
class MicroBatchResult:
    """Results of a micro-batch on this rank: its part of the losses, and the loss of each token (M, s).

    None where a user's loss does not provide them, and on ranks without the last pipeline stage.
    """

    batch: MicroBatch
    losses: Losses | None
    token_loss: Tensor | None


RunMicroBatches = Callable[[StepInputs], Iterator[MicroBatchResult]]
"""Runs the micro-batches of a step forward and backward, and yields each while routers hold its records."""


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of parameters, gradients and optimizer state for a recipe's precision."""
    return torch.float32 if precision == "mixed" else _DTYPES[precision]


def compute_dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of the arithmetic; only `mixed` computes in another dtype than it stores."""
    return torch.bfloat16 if precision == "mixed" else _DTYPES[precision]

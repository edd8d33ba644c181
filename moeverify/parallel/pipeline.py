"""Pipeline parallelism: consecutive layers on the ranks of the pp axis, run by torch.distributed.pipelining.

Forward, stage s of n: h_s = layers_s(h_{s-1}). A vector of losses travels with the hidden states: l_s =
l_{s-1} + own_s. The final loss, lm(h_n) + sum(l_n), is therefore the loss of the whole model, and its
gradient reaches the routers of every stage together with the gradient of h.

Backward: the transposed sends. Zero-bubble schedules compute the gradients of a stage's inputs first and of
its weights later.

The schedule's own division of gradients by the number of micro-batches is off, because losses are already
divided by the token count of the global batch. A tied embedding is on the first and the last stage, each
with a partial gradient; `plan.py` sums them.

`moeverify.cases.axes.schedules` lists the schedules and their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import PipelineStage, schedules

from moeverify.cases.axes.schedules import PIPELINE_SCHEDULE
from moeverify.cases.axes.stages import split_layers, stages_of
from moeverify.cases.schema import Layout, ReferenceModel
from moeverify.model.router import RouterStats
from moeverify.model.transformer import Transformer
from moeverify.seams import seam

NUM_CARRIED = 2  # number of carried losses: balance and z


class StepParts(Protocol):
    """The parts of a training step that stages run around the model, such as the loss. Micro-batches count from 0."""

    def begin(self, stage: ModelStage, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return positions and valid of a micro-batch, (M, s) both; called before each forward pass."""

    def add(
        self, stage: ModelStage, micro_batch: int, routers: Sequence[RouterStats], carried: Tensor | None
    ) -> Tensor:
        """Return the sum of losses up to this stage, (NUM_CARRIED,); called after each forward pass."""

    def loss(self, micro_batch: int, logits: Tensor, carried: Tensor) -> Tensor:
        """Return the loss to differentiate, (); called on the last stage."""


class ModelStage(Transformer):
    """One stage of the model: some of its layers, plus the embedding or the head at the ends.

    Set `work` before a forward pass. Parameters keep their FQNs of the whole model.
    """

    def __init__(
        self, spec: ReferenceModel, number: int, stages: Sequence[range], *, experts: str, dtype: torch.dtype
    ) -> None:
        super().__init__(spec, experts=experts, dtype=dtype, device="meta")
        self.number = number
        self.num_stages = len(stages)
        self.work: StepParts | None = None
        # The whole model is built on meta and cut down, so that the remaining parameters keep their FQNs.
        for layer in range(spec.num_layers):
            if layer not in stages[number]:
                del self.layers[str(layer)]
        if not self.is_last:
            self.norm = self.lm_head = None
        if not self.is_first and not (self.is_last and spec.tie_embedding):
            self.embed = None

    @property
    def is_first(self) -> bool:
        """Return whether this stage receives the tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Return whether this stage returns the logits."""
        return self.number == self.num_stages - 1

    def forward(  # type: ignore[override]
        self, received: Tensor, carried: Tensor | None = None, *, number: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states, or logits, and the losses so far of the micro-batch `number` (1).

        Shapes: received (M, s) tokens or (M, s', H) hidden states, with s' less than s under sequence
        parallelism; carried (NUM_CARRIED,).
        """
        assert self.work is not None
        micro_batch = int(number)
        positions, valid = self.work.begin(self, micro_batch)
        output = super().forward(received, positions, valid)
        return output.logits, self.work.add(self, micro_batch, output.routers, carried)


class Stages(nn.Module):
    """The stages of one rank as one module; `parallel.regions.local_shard` strips the names that it adds."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        for stage in stages:
            self.add_module(f"_pipeline_stage_{stage.number}", stage)


@dataclass(frozen=True)
class Shapes:
    """Sizes of the tensors sent between stages, per micro-batch.

    Tokens are (rows, positions), hidden states (rows, hidden_positions, H). `hidden_positions` is smaller
    than `positions` under sequence parallelism.
    """

    rows: int
    positions: int
    hidden_positions: int


@dataclass(frozen=True)
class Pipeline:
    """The stages of this rank, in order, and the schedule that runs them."""

    stages: Sequence[ModelStage]
    schedule: Any
    num_micro_batches: int

    @seam
    def run(self, tokens: Tensor, work: StepParts) -> None:
        """Run all micro-batches forward and backward; gradients then lack only sums over other axes.

        Collective: all ranks of pp. Shape: tokens (rows of all micro-batches, s); only the first stage
        reads them.
        """
        for stage in self.stages:
            stage.work = work
        # The schedule splits these numbers like the tokens and passes them to each stage. `StepParts.begin` uses
        # the number to look up inputs that differ between micro-batches (positions, padding).
        numbers = torch.arange(self.num_micro_batches)
        arguments = (tokens,) if self.stages[0].is_first else ()
        target = numbers if self.stages[-1].is_last else None
        self.schedule.step(*arguments, target=target, number=numbers, return_outputs=False)
        for stage in self.stages:
            stage.work = None


def build_stages(
    spec: ReferenceModel, layout: Layout, pp_rank: int, *, experts: str, dtype: torch.dtype
) -> list[ModelStage]:
    """Return the stages of a rank of the pp axis, on the meta device."""
    layers = split_layers(layout, spec.num_layers)
    return [
        ModelStage(spec, number, layers, experts=experts, dtype=dtype)
        for number in stages_of(layout, pp_rank)
    ]


@seam
def build_pipeline(
    stages: Sequence[ModelStage], layout: Layout, shapes: Shapes, group: ProcessGroup, device: torch.device
) -> Pipeline:
    """Return the pipeline of stages that are ready to train.

    Collective: all ranks of `group`, the pp axis.
    """
    wrapped = [_wrap(stage, shapes, group, device) for stage in stages]
    last = next((stage for stage in stages if stage.is_last), None)

    def compute_loss(output: tuple[Tensor, Tensor], number: Tensor) -> Tensor:
        assert last is not None
        assert last.work is not None
        return last.work.loss(int(number), *output)

    options = {"loss_fn": compute_loss, "scale_grads": False}
    num, chosen = layout.micro_batches, PIPELINE_SCHEDULE.find(layout.pipeline_schedule)
    schedule = getattr(schedules, chosen.torch_class)
    return Pipeline(stages, schedule(wrapped if chosen.takes_list else wrapped[0], num, **options), num)


def _wrap(stage: ModelStage, shapes: Shapes, group: ProcessGroup, device: torch.device) -> PipelineStage:
    """Return torch's stage with explicit shapes; shape inference would run the model once more."""
    dtype, spec = next(stage.parameters()).dtype, stage.spec

    def describe(*shape: int, dtype: torch.dtype, differentiable: bool = True) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=differentiable)

    hidden = describe(shapes.rows, shapes.hidden_positions, spec.hidden, dtype=dtype)
    tokens = describe(shapes.rows, shapes.positions, dtype=torch.int64, differentiable=False)
    logits = describe(shapes.rows, shapes.positions, spec.vocab_size, dtype=dtype)
    # float64 for any model dtype: the losses of all layers are summed in it.
    carried = describe(NUM_CARRIED, dtype=torch.float64)
    return _Stage(
        stage,
        stage.number,
        stage.num_stages,
        device,
        input_args=(tokens,) if stage.is_first else (hidden, carried),
        output_args=(logits if stage.is_last else hidden, carried),
        group=group,
    )


class _Stage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        """Return the sends that open NCCL connections; gloo does not need them.

        With two neighboring stages on one rank, torch 2.11 sends to the rank itself, which gloo cannot do.
        """
        return super()._get_init_p2p_neighbors_ops() if "nccl" in dist.get_backend(self.group) else []

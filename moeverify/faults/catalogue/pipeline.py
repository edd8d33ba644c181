"""Pipelines: losses, divisions and metadata of micro-batches, and weights that two stages share.

Class L. A schedule runs the backward passes itself. Scaling, accumulation and reduction are split between
the schedule and the training loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.cases.schema import Layout
    from moeverify.parallel.gradients import Reduction
    from moeverify.parallel.pipeline import ModelStage, Pipeline, Shapes, StepParts


_ROUNDS = 2


@fault(
    "L01",
    title="accumulated gradients decay under a pipeline",
    source="pytorch/torchtitan #1733, PR #1732 (3e1b843ec)",
    mechanism="scale_grads divides the accumulated gradient after every call of the schedule, earlier ones again",
    trigger="a pipeline with gradient accumulation around it",
    case=make_case("l01", preset="tiny-gpt", pp=2, micro_batches=4, stage_layers=(2, 1)),
    where=(At(share="micro_batch"),),
    causes=(Cause.SHARE_WEIGHTS,),
    is_moe=False,
)
def l01_scaled_accumulation(patch: Patch) -> None:
    """Run the schedule in two rounds, each followed by the schedule's own division of all gradients."""
    import torch

    from moeverify.parallel.pipeline import Pipeline, build_pipeline
    from moeverify.train.pipeline import StageWork

    @patch.wrap(build_pipeline)
    def build_one_round(
        original: Original[Pipeline],
        stages: Sequence[ModelStage],
        layout: Layout,
        shapes: Shapes,
        group: ProcessGroup,
        device: torch.device,
    ) -> Pipeline:
        size = layout.micro_batches // _ROUNDS
        short = layout.model_copy(update={"micro_batches": size})
        built = original(stages, short, shapes, group, device)
        built.schedule.scale_grads = True
        return replace(built, num_micro_batches=layout.micro_batches)

    @patch.replace(Pipeline.run)
    def run_rounds(self: Pipeline, tokens: Tensor, work: StepParts) -> None:
        numbers = torch.arange(self.num_micro_batches)
        for stage in self.stages:
            stage.work = work
        for rows, part in zip(tokens.chunk(_ROUNDS), numbers.chunk(_ROUNDS), strict=True):
            arguments = (rows,) if self.stages[0].is_first else ()
            target = part if self.stages[-1].is_last else None
            self.schedule.step(*arguments, target=target, number=part, return_outputs=False)

    @patch.wrap(StageWork.loss)
    def mean_of_round(
        original: Original[Tensor], self: StageWork, micro_batch: int, logits: Tensor, carried: Tensor
    ) -> Tensor:
        # A mean in each round, as the division assumes.
        return original(self, micro_batch, logits, carried) * (len(self.batches) // _ROUNDS)


@fault(
    "L02",
    title="gradients under a pipeline are larger by the number of tokens",
    source="pytorch/torchtitan #2972, PR #4194",
    mechanism="the schedule differentiates the raw sum; the division by tokens is done on the reported loss only",
    trigger="a pipeline",
    case=make_case("l02", preset="tiny-gpt", pp=2, micro_batches=2, stage_layers=(2, 1)),
    where=(At(stage=Stage.BACKWARD),),
    causes=(Cause.SCALE,),
    is_moe=False,
    notes="no axis is at fault: every gradient is larger by the number of valid tokens of the step",
)
def l02_pipeline_backpropagates_sum(patch: Patch) -> None:
    """Give the schedule the loss before its division by the tokens of the global batch."""
    from moeverify.train.pipeline import StageWork

    @patch.wrap(StageWork.loss)
    def undivided(
        original: Original[Tensor], self: StageWork, micro_batch: int, logits: Tensor, carried: Tensor
    ) -> Tensor:
        return original(self, micro_batch, logits, carried) * self.normalizers.num_valid


@fault(
    "L03",
    title="gradients under a pipeline are divided by the micro-batches once more",
    source="pytorch/pytorch PR #144352; AReaL PR #1273",
    mechanism="the loss function divides by the number of micro-batches, and the schedule divides again",
    trigger="a pipeline with more than one micro-batch",
    case=make_case("l03", dp_shard=2, pp=2, micro_batches=4, stage_layers=(2, 1)),
    where=(At(axis="micro-batches"),),
    causes=(Cause.SCALE,),
)
def l03_schedule_divides_again(patch: Patch) -> None:
    """Keep the schedule's own division, which is enabled by default."""
    from moeverify.parallel.pipeline import build_pipeline

    @patch.wrap(build_pipeline)
    def build_dividing(original: Original[Pipeline], *args: Any, **named: Any) -> Pipeline:
        built = original(*args, **named)
        built.schedule.scale_grads = True
        return built


RESTART = 2


@fault(
    "L04",
    title="gradients of earlier micro-batches are lost where a stage starts anew",
    source="NVIDIA-NeMo/Automodel PR #3530 (c4c0e4b8f)",
    mechanism="a stage that is initialized for another sequence length sets its gradients to none between "
    "micro-batches",
    trigger="a pipeline over rows of different length",
    case=make_case("l04", preset="tiny-gpt", pp=2, micro_batches=4, stage_layers=(2, 1)),
    where=(At(share="micro_batch"),),
    causes=(Cause.SHARE_WEIGHTS,),
    is_moe=False,
    notes="rows are equally long here: the third micro-batch takes the place of one of another length",
)
def l04_gradients_of_earlier_shapes(patch: Patch) -> None:
    """Drop a stage's gradients at the start of the third micro-batch."""
    from moeverify.train.pipeline import StageWork

    @patch.wrap(StageWork.begin)
    def start_anew(
        original: Original[tuple[Tensor, Tensor]], self: StageWork, stage: ModelStage, micro_batch: int
    ) -> tuple[Tensor, Tensor]:
        if micro_batch == RESTART:
            for parameter in stage.parameters():
                parameter.grad = None
        return original(self, stage, micro_batch)


@fault(
    "L07",
    title="embedding and head of a tied model drift apart",
    source="NVIDIA/Megatron-LM #656",
    mechanism="the all-reduce of the gradients of the tied weight over the first and the last stage is left out",
    trigger="a pipeline with a tied embedding",
    case=make_case("l07", preset="stress-tied", pp=2, micro_batches=2),
    where=(At(name="embed*", axis="pp"),),
    causes=(Cause.MISSING_REDUCTION,),
    is_moe=False,
)
def l07_untied_embedding(patch: Patch) -> None:
    """Skip the sum over the embedding's group."""
    from moeverify.parallel.plan import sum_tied

    patch.replace(sum_tied)(lambda shards, meshes: None)


VOCABULARY = 96  # of the case's model


@fault(
    "L08",
    title="the gradient of a tied weight is doubled",
    source="pytorch/torchtitan PR #3174 (2b935fa3c)",
    mechanism="the full gradient of a weight with two uses is added once for each",
    trigger="a tied embedding",
    case=make_case("l08", preset="stress-tied", dp_shard=2),
    where=(At(name="embed*"),),
    causes=(Cause.SCALE,),
    is_moe=False,
)
def l08_tied_gradient_doubled(patch: Patch) -> None:
    """Double the gradient of the embedding, which the head also uses."""
    from moeverify.parallel.gradients import finalize_gradients

    @patch.wrap(finalize_gradients)
    def write_twice(
        original: Original[None], parameters: Sequence[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        original(parameters, reductions)
        for parameter in parameters:
            if parameter.shape[0] == VOCABULARY and parameter.grad is not None:
                parameter.grad.mul_(2)


@fault(
    "L09",
    title="row lengths of the first micro-batch are used for all",
    source="pytorch/torchtitan c0401565c",
    mechanism="metadata of the whole batch is cut as if a micro-batch began at its first row",
    trigger="a pipeline whose stages need to know where rows end",
    case=make_case("l09", pp=2, micro_batches=2, stage_layers=(2, 1)),
    where=(At(name="padding mask"), At(term="balance"), At(term="z"), At(name="*.moe.router*")),
    causes=(Cause.DATA, Cause.STATE, Cause.PADDING, Cause.FORWARD, Cause.TERM_SCALE),
    notes="upstream's metadata are the offsets of packed rows; here they say which tokens are padding",
)
def l09_metadata_of_first_micro_batch(patch: Patch) -> None:
    """Use the row lengths of the first micro-batch for every micro-batch."""
    from moeverify.train.pipeline import StageWork

    @patch.wrap(StageWork.begin)
    def begin_as_first(
        original: Original[tuple[Tensor, Tensor]], self: StageWork, stage: ModelStage, micro_batch: int
    ) -> tuple[Tensor, Tensor]:
        positions, _ = original(self, stage, micro_batch)
        return positions, self.batches[0].valid

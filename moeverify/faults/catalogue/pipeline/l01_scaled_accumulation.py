"""A pipeline divides all gradients accumulated so far after every round of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

_ROUNDS = 2


def inject(patch: Patch) -> None:
    """Run the schedule in two rounds, each followed by the schedule's own division of all gradients."""
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.cases.schema import Layout
    from moeverify.parallel.pipeline import Pipeline, Shapes, Stage, Work, build_pipeline
    from moeverify.train.pipeline import StageWork

    @patch.wrap(build_pipeline)
    def build_one_round(
        original: Original[Pipeline],
        stages: Sequence[Stage],
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
    def run_rounds(self: Pipeline, tokens: Tensor, work: Work) -> None:
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


FAULT = Fault(
    number="L01",
    title="accumulated gradients decay under a pipeline",
    source="pytorch/torchtitan #1733, PR #1732 (3e1b843ec)",
    mechanism="scale_grads divides the accumulated gradient after every call of the schedule, earlier ones again",
    trigger="a pipeline with gradient accumulation around it",
    case=make_case("l01", preset="tiny-gpt", pp=2, micro_batches=4, stage_layers=(2, 1)),
    expected=Expected(where=(At(share="micro_batch"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

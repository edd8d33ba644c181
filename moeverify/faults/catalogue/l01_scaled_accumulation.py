"""A pipeline divides what has been accumulated so far after every round of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moeverify.case.schema import Layout
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.parallel import plan
from moeverify.parallel.pipeline import Pipeline, Work
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.train.pipeline import StageWork

_ROUNDS = 2


def inject() -> None:
    """Run the schedule in two rounds, each of which ends with the schedule's own division of all gradients."""

    def build_pipeline(stages: Any, layout: Layout, *rest: Any) -> Pipeline:
        size = layout.micro_batches // _ROUNDS
        built = original(stages, layout.model_copy(update={"micro_batches": size}), *rest)
        built.schedule.scale_grads = True
        return replace(built, num_micro_batches=layout.micro_batches)

    def run(self: Pipeline, tokens: Tensor, work: Work) -> None:
        numbers = torch.arange(self.num_micro_batches)
        for stage in self.stages:
            stage.work = work
        for rows, part in zip(tokens.chunk(_ROUNDS), numbers.chunk(_ROUNDS), strict=True):
            arguments = (rows,) if self.stages[0].is_first else ()
            target = part if self.stages[-1].is_last else None
            self.schedule.step(*arguments, target=target, number=part, return_outputs=False)

    def loss(self: StageWork, *arguments: Any) -> Tensor:
        value: Tensor = keep_loss(self, *arguments)
        return value * (len(self.batches) // _ROUNDS)  # a mean in each round, as the division expects

    original, keep_loss = plan.build_pipeline, StageWork.loss
    plan.build_pipeline = build_pipeline
    Pipeline.run = run
    StageWork.loss = loss


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

"""A stage loses its accumulated gradients when a micro-batch of another length reinitializes it."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

RESTART = 2


def inject(patch: Patch) -> None:
    """Drop a stage's gradients at the start of the third micro-batch."""
    from torch import Tensor

    from moeverify.parallel.pipeline import Stage
    from moeverify.train.pipeline import StageWork

    @patch.wrap(StageWork.begin)
    def start_anew(
        original: Original[tuple[Tensor, Tensor]], self: StageWork, stage: Stage, micro_batch: int
    ) -> tuple[Tensor, Tensor]:
        if micro_batch == RESTART:
            for parameter in stage.parameters():
                parameter.grad = None
        return original(self, stage, micro_batch)


FAULT = Fault(
    number="L04",
    title="gradients of earlier micro-batches are lost where a stage starts anew",
    source="NVIDIA-NeMo/Automodel PR #3530 (c4c0e4b8f)",
    mechanism=(
        "a stage that is initialized for another sequence length sets its gradients to none between "
        "micro-batches"
    ),
    trigger="a pipeline over rows of different length",
    case=make_case("l04", preset="tiny-gpt", pp=2, micro_batches=4, stage_layers=(2, 1)),
    expected=Expected(where=(At(share="micro_batch"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
    notes="rows are equally long here: the third micro-batch stands for one of another length",
)

"""A pipeline backpropagates the sum over tokens; only the reported number is divided."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Give the schedule the loss before its division by the tokens of the global batch."""
    from torch import Tensor

    from moeverify.train.pipeline import StageWork

    @patch.wrap(StageWork.loss)
    def undivided(
        original: Original[Tensor], self: StageWork, micro_batch: int, logits: Tensor, carried: Tensor
    ) -> Tensor:
        return original(self, micro_batch, logits, carried) * self.normalizers.num_valid


FAULT = Fault(
    number="L02",
    title="gradients under a pipeline are larger by the number of tokens",
    source="pytorch/torchtitan #2972, PR #4194",
    mechanism="the schedule differentiates the raw sum; the division by tokens is done on the reported loss only",
    trigger="a pipeline",
    case=make_case("l02", preset="tiny-gpt", pp=2, micro_batches=2, stage_layers=(2, 1)),
    expected=Expected(where=(At(stage=Stage.BACKWARD),), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
    notes="no axis is at fault: every gradient is larger by the number of valid tokens of the step",
)

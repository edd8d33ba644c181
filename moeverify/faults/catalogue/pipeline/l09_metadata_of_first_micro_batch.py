"""Stages read batch metadata from the start of the batch, for every micro-batch."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Use the row lengths of the first micro-batch for every micro-batch."""
    from torch import Tensor

    from moeverify.parallel.pipeline import Stage
    from moeverify.train.pipeline import StageWork

    @patch.wrap(StageWork.begin)
    def begin_as_first(
        original: Original[tuple[Tensor, Tensor]], self: StageWork, stage: Stage, micro_batch: int
    ) -> tuple[Tensor, Tensor]:
        positions, _ = original(self, stage, micro_batch)
        return positions, self.batches[0].valid


FAULT = Fault(
    number="L09",
    title="row lengths of the first micro-batch are used for all",
    source="pytorch/torchtitan c0401565c",
    mechanism="metadata of the whole batch is cut as if a micro-batch began at its first row",
    trigger="a pipeline whose stages need to know where rows end",
    case=make_case("l09", pp=2, micro_batches=2, stage_layers=(2, 1)),
    expected=Expected(
        where=(At(name="padding mask"), At(term="balance"), At(term="z"), At(name="*.moe.router*")),
        causes=(Cause.DATA, Cause.STATE, Cause.PADDING, Cause.FORWARD, Cause.TERM_SCALE),
    ),
    inject=inject,
    notes="upstream's metadata are the offsets of packed rows; here they say which tokens are padding",
)

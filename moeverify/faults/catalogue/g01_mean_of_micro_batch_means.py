"""Each micro-batch is averaged over its own tokens, and the averages over the micro-batches."""

from __future__ import annotations

from torch import Tensor

from moeverify.case.schema import Recipe
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.train import loop
from moeverify.train.data import Batch
from moeverify.train.objective import Losses, Normalizers, count_valid
from moeverify.train.program import Program


def inject() -> None:
    """Divide a micro-batch by its own tokens, over all ranks, times the number of micro-batches."""

    def compute_losses(
        recipe: Recipe, program: Program, batch: Batch, normalizers: Normalizers
    ) -> tuple[Losses, Tensor | None]:
        own = count_valid([batch], program.sums, normalizers.num_rows)
        mean = Normalizers(own.num_valid * program.num_micro_batches, own.num_rows)
        return original(recipe, program, batch, mean)

    original = loop.compute_losses
    loop.compute_losses = compute_losses


FAULT = Fault(
    number="G01",
    title="gradient accumulation averages the means of micro-batches",
    source="huggingface/transformers PR #34191, PR #34198",
    mechanism="the mean of micro-batch means is not the mean over all tokens where their counts differ",
    trigger="gradient accumulation over micro-batches of unequal token counts",
    case=make_case("g01", preset="tiny-gpt", dp_shard=2, micro_batches=2),
    expected=Expected(where=(At(share="micro_batch"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

"""A rank averages each of its micro-batches over that micro-batch's tokens, so the loss depends on their size."""

from __future__ import annotations

from torch import Tensor

from moeverify.case.schema import Recipe
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.train import loop
from moeverify.train.data import Batch
from moeverify.train.objective import Losses, Normalizers
from moeverify.train.program import Program


def inject() -> None:
    """Divide by the tokens of this rank's micro-batch, times the micro-batches of all ranks."""

    def compute_losses(
        recipe: Recipe, program: Program, batch: Batch, normalizers: Normalizers
    ) -> tuple[Losses, Tensor | None]:
        num_means = program.num_micro_batches * int(program.scale)
        mean = Normalizers(batch.valid.sum() * num_means, normalizers.num_rows)
        return original(recipe, program, batch, mean)

    original = loop.compute_losses
    loop.compute_losses = compute_losses


FAULT = Fault(
    number="G09",
    title="the loss depends on the micro-batch size",
    source="NVIDIA-NeMo/Speech #8343",
    mechanism="the masked loss is averaged over the tokens of one micro-batch on one rank, and those means averaged",
    trigger="more than one row in a micro-batch, rows of unequal token counts",
    case=make_case("g09", preset="tiny-gpt", dp_shard=2, micro_batches=2),
    expected=Expected(where=(At(share="micro_batch"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

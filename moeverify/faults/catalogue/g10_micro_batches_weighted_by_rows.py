"""Micro-batches are weighted by their rows, although their losses are means over tokens."""

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
    """Weight the mean of a micro-batch by its share of the rows of the global batch."""

    def compute_losses(
        recipe: Recipe, program: Program, batch: Batch, normalizers: Normalizers
    ) -> tuple[Losses, Tensor | None]:
        share = len(batch.share.rows) / normalizers.num_rows
        return original(recipe, program, batch, Normalizers(batch.valid.sum() / share, normalizers.num_rows))

    original = loop.compute_losses
    loop.compute_losses = compute_losses


FAULT = Fault(
    number="G10",
    title="micro-batches count by rows instead of tokens",
    source="mosaicml/composer PR #3273; mosaicml/llm-foundry PR #1595",
    mechanism="the mean loss of a micro-batch is weighted by its number of samples; padding makes tokens unequal",
    trigger="gradient accumulation over padded rows",
    case=make_case("g10", preset="tiny-gpt", dp_replicate=2, data_parallel="ddp", micro_batches=4),
    expected=Expected(where=(At(share="micro_batch"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

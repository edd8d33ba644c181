"""The token count covers the ranks of the sequence, the factor of the loss does not: 1/cp of the loss."""

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
    """Take out of the losses the number of ranks that share a sequence, which in the case are all ranks."""

    def compute_losses(
        recipe: Recipe, program: Program, batch: Batch, normalizers: Normalizers
    ) -> tuple[Losses, Tensor | None]:
        losses, token_loss = original(recipe, program, batch, normalizers)
        num_ranks = program.scale
        return Losses(losses.lm / num_ranks, losses.balance / num_ranks, losses.z / num_ranks), token_loss

    original = loop.compute_losses
    loop.compute_losses = compute_losses


FAULT = Fault(
    number="G07",
    title="loss and gradients are cp times too small under Ulysses",
    source="ByteDance-Seed/VeOmni PR #338; volcengine/verl PR #3691",
    mechanism="the denominator is all-reduced over dp * sp ranks, the numerator multiplied by dp only",
    trigger="sequence parallelism by all-to-all",
    case=make_case("g07", preset="tiny-gpt", cp=2, context_parallel="alltoall"),
    expected=Expected(where=(At(axis="cp"),), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
)

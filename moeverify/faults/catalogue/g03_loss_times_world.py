"""The loss is multiplied by the number of all processes, where those of data parallelism are meant."""

from __future__ import annotations

import torch.distributed as dist
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
    """Multiply the losses so that with the ranks of the loss the product is the size of the world."""

    def compute_losses(
        recipe: Recipe, program: Program, batch: Batch, normalizers: Normalizers
    ) -> tuple[Losses, Tensor | None]:
        losses, token_loss = original(recipe, program, batch, normalizers)
        factor = dist.get_world_size() / program.scale
        return Losses(losses.lm * factor, losses.balance * factor, losses.z * factor), token_loss

    original = loop.compute_losses
    loop.compute_losses = compute_losses


FAULT = Fault(
    number="G03",
    title="loss and gradients are tp times too large",
    source="huggingface/transformers #39648, PR #39674",
    mechanism="to undo the average over data ranks the loss is multiplied by all processes, those of tp included",
    trigger="tp or cp under a trainer that averages tokens over devices",
    case=make_case("g03", preset="tiny-gpt", tp=2),
    expected=Expected(where=(At(axis="tp"),), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
)

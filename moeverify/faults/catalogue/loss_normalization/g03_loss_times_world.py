"""The loss is multiplied by the number of all processes instead of the data-parallel ones."""

from __future__ import annotations

from moeverify.faults.catalogue.loss_normalization.losses import multiply
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Multiply the losses such that the total factor, with the loss ranks, is the world size."""
    import torch.distributed as dist

    multiply(patch, lambda program: dist.get_world_size() / program.scale)


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

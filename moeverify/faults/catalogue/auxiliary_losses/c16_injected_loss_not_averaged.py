"""The gradient of an injected loss is not averaged over micro-batches, unlike the main loss's."""

from __future__ import annotations

from dataclasses import replace

from moeverify.faults.catalogue.auxiliary_losses.balance import scale_gradient
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Multiply the gradient of the z loss by the number of micro-batches; its value stays right."""
    from torch import Tensor

    from moeverify.cases.schema import Recipe
    from moeverify.train.data import Batch
    from moeverify.train.forward import compute_losses
    from moeverify.train.objective import Losses, Normalizers
    from moeverify.train.program import Program

    @patch.wrap(compute_losses)
    def weigh_z_by_micro_batches(
        original: Original[tuple[Losses, Tensor | None]],
        recipe: Recipe,
        program: Program,
        batch: Batch,
        normalizers: Normalizers,
    ) -> tuple[Losses, Tensor | None]:
        losses, token_loss = original(recipe, program, batch, normalizers)
        return replace(losses, z=scale_gradient(losses.z, program.num_micro_batches)), token_loss


FAULT = Fault(
    number="C16",
    title="an injected loss weighs more with more micro-batches",
    source="NVIDIA/Megatron-LM PR #4070",
    mechanism="the scale of a loss that is injected in the backward pass lacks 1/micro-batches",
    trigger="gradient accumulation",
    case=make_case("c16", dp_shard=2, micro_batches=4),
    expected=Expected(where=(At(term="z"), At(name="*.moe.router*")), causes=(Cause.TERM_SCALE,)),
    inject=inject,
    notes="upstream the injected loss is that of a sparse attention indexer; here it is the router's z loss",
)

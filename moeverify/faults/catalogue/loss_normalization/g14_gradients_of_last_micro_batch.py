"""Gradients are set to zero for every micro-batch, so only the last one counts."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Drop the accumulated gradients before each forward pass."""
    from torch import Tensor

    from moeverify.cases.schema import Recipe
    from moeverify.train.data import Batch
    from moeverify.train.forward import compute_losses
    from moeverify.train.objective import Losses, Normalizers
    from moeverify.train.program import Program

    @patch.wrap(compute_losses)
    def forget_gradients(
        original: Original[tuple[Losses, Tensor | None]],
        recipe: Recipe,
        program: Program,
        batch: Batch,
        normalizers: Normalizers,
    ) -> tuple[Losses, Tensor | None]:
        program.engine.zero_grad()
        return original(recipe, program, batch, normalizers)


FAULT = Fault(
    number="G14",
    title="only the last micro-batch counts",
    source="pytorch/torchtitan PR #3575 (da230bbb2)",
    mechanism="zero_grad inside the loop over micro-batches",
    trigger="gradient accumulation",
    case=make_case("g14", preset="tiny-gpt", tp=2, micro_batches=4),
    expected=Expected(where=(At(share="micro_batch"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    is_moe=False,
)

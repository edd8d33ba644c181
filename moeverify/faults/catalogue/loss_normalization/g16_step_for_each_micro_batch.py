"""The optimizer steps after every micro-batch."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Step before each micro-batch except the first: the flag for `synchronize` also means `step`."""
    from torch import Tensor

    from moeverify.cases.schema import Recipe
    from moeverify.train.data import Batch
    from moeverify.train.forward import compute_losses
    from moeverify.train.objective import Losses, Normalizers
    from moeverify.train.program import Program

    @patch.wrap(compute_losses)
    def step_early(
        original: Original[tuple[Losses, Tensor | None]],
        recipe: Recipe,
        program: Program,
        batch: Batch,
        normalizers: Normalizers,
    ) -> tuple[Losses, Tensor | None]:
        if batch.share.rows[0] != program.share.rows[0]:
            program.finalize()
            program.engine.step()
            program.engine.zero_grad()
        return original(recipe, program, batch, normalizers)


FAULT = Fault(
    number="G16",
    title="the optimizer steps on each micro-batch",
    source="huggingface/accelerate PR #2790",
    mechanism="one flag stands for `synchronize gradients` and for `step now`",
    trigger="gradient accumulation",
    case=make_case("g16", preset="tiny-gpt", tp=2, micro_batches=2, optimizer="adamw"),
    expected=Expected(
        where=(At(name="embed*"),),
        causes=(
            Cause.STATE,
            Cause.STALE,
        ),
    ),
    inject=inject,
    is_moe=False,
)

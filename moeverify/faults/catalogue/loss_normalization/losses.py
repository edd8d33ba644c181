"""Helpers of this class: losses with another divisor or an extra factor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moeverify.faults.patch import Original, Patch

if TYPE_CHECKING:
    from torch import Tensor

    from moeverify.train.data import Batch
    from moeverify.train.objective import Normalizers
    from moeverify.train.program import Program


def divide_by(patch: Patch, count: Callable[[Program, Batch, Normalizers], Tensor]) -> None:
    """Divide the losses of each micro-batch by `count` tokens () instead of the global batch's tokens."""
    from moeverify.cases.schema import Recipe
    from moeverify.train.forward import compute_losses
    from moeverify.train.objective import Losses, Normalizers

    @patch.wrap(compute_losses)
    def divided(
        original: Original[tuple[Losses, Tensor | None]],
        recipe: Recipe,
        program: Program,
        batch: Batch,
        normalizers: Normalizers,
    ) -> tuple[Losses, Tensor | None]:
        chosen = Normalizers(count(program, batch, normalizers), normalizers.num_rows)
        return original(recipe, program, batch, chosen)


def multiply(patch: Patch, choose: Callable[[Program], float]) -> None:
    """Multiply all losses of each micro-batch by a factor."""
    from moeverify.cases.schema import Recipe
    from moeverify.train.forward import compute_losses
    from moeverify.train.objective import Losses

    @patch.wrap(compute_losses)
    def multiplied(
        original: Original[tuple[Losses, Tensor | None]],
        recipe: Recipe,
        program: Program,
        batch: Batch,
        normalizers: Normalizers,
    ) -> tuple[Losses, Tensor | None]:
        losses, token_loss = original(recipe, program, batch, normalizers)
        factor = choose(program)
        return Losses(losses.lm * factor, losses.balance * factor, losses.z * factor), token_loss


def count_own_tokens(patch: Patch) -> None:
    """Divide by the tokens of this rank, times the number of averaged ranks: a mean of means."""
    import torch

    from moeverify.train.objective import Normalizers, Sums, count_valid

    @patch.replace(count_valid)
    def count_own(batches: Sequence[Batch], sums: Sums, num_rows: int) -> Normalizers:
        own = torch.stack([batch.valid.sum() for batch in batches]).sum()
        return Normalizers(own * sums.over_batch(torch.ones_like(own)), num_rows)

"""Helpers of this class: a changed balance loss, and a scaled gradient of a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moeverify.faults.patch import Original, Patch

if TYPE_CHECKING:
    from torch import Tensor

    from moeverify.train.data import Batch


def change_balance(patch: Patch, change: Callable[[Tensor, Batch], Tensor]) -> None:
    """Replace the balance loss () of each micro-batch by `change(balance, batch)`; the z loss stays."""
    from moeverify.cases.schema import MoE
    from moeverify.model.router import RouterStats
    from moeverify.train.objective import Normalizers, Sums, router_losses

    @patch.wrap(router_losses)
    def changed(
        original: Original[tuple[Tensor, Tensor]],
        spec: MoE,
        routers: Sequence[RouterStats],
        batch: Batch,
        normalizers: Normalizers,
        sums: Sums,
    ) -> tuple[Tensor, Tensor]:
        balance, z = original(spec, routers, batch, normalizers, sums)
        return change(balance, batch), z


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return the same value, with its gradient multiplied by a factor."""
    return value.detach() + (value - value.detach()) * factor

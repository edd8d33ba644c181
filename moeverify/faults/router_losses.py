"""Changes of the router losses, of their inputs, and of the routing that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moeverify.faults.patch import Original, Patch

if TYPE_CHECKING:
    from torch import Tensor

    from moeverify.cases.schema import MoE
    from moeverify.model.router import Router, RouterStats, Routing
    from moeverify.train.data import MicroBatch
    from moeverify.train.objective import GroupSums, Normalizers


def change_statistics(patch: Patch, change: Callable[[Sequence[RouterStats]], list[RouterStats]]) -> None:
    """Compute the router losses of each micro-batch from `change(routers)`."""
    from moeverify.train.objective import router_losses

    @patch.wrap(router_losses)
    def of_changed(
        original: Original[tuple[Tensor, Tensor]],
        spec: MoE,
        routers: Sequence[RouterStats],
        batch: MicroBatch,
        normalizers: Normalizers,
        sums: GroupSums,
    ) -> tuple[Tensor, Tensor]:
        return original(spec, change(routers), batch, normalizers, sums)


def change_router_losses(
    patch: Patch, change: Callable[[Tensor, Tensor, MicroBatch, GroupSums], tuple[Tensor, Tensor]]
) -> None:
    """Replace both router losses () of each micro-batch by `change(balance, z, batch, sums)`."""
    from moeverify.train.objective import router_losses

    @patch.wrap(router_losses)
    def changed(
        original: Original[tuple[Tensor, Tensor]],
        spec: MoE,
        routers: Sequence[RouterStats],
        batch: MicroBatch,
        normalizers: Normalizers,
        sums: GroupSums,
    ) -> tuple[Tensor, Tensor]:
        balance, z = original(spec, routers, batch, normalizers, sums)
        return change(balance, z, batch, sums)


def change_balance(patch: Patch, change: Callable[[Tensor, MicroBatch], Tensor]) -> None:
    """Replace the balance loss () of each micro-batch by `change(balance, batch)`; the z loss stays."""
    change_router_losses(patch, lambda balance, z, batch, sums: (change(balance, batch), z))


def change_routing(patch: Patch, change: Callable[[Routing, Router, Tensor, Tensor], Routing]) -> None:
    """Replace the routing of each router by `change(routing, router, x, valid)`."""
    from moeverify.model.router import Router

    @patch.wrap(Router.forward)
    def changed(original: Original[Routing], self: Router, x: Tensor, valid: Tensor | None = None) -> Routing:
        assert valid is not None
        return change(original(self, x, valid), self, x, valid)


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return the same value, with its gradient multiplied by a factor."""
    return value.detach() + (value - value.detach()) * factor

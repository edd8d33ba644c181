"""The gradient of the balance loss is scaled by local tokens and divided by the tokens of all tp ranks."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.catalogue.auxiliary_losses.balance import scale_gradient
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

TP = 2


def inject(patch: Patch) -> None:
    """Divide the gradients of the balance and z losses by the tp degree; their values stay right."""
    from torch import Tensor

    from moeverify.cases.schema import MoE
    from moeverify.model.router import RouterStats
    from moeverify.train.data import Batch
    from moeverify.train.objective import Normalizers, Sums, router_losses

    @patch.wrap(router_losses)
    def divide_by_tp(
        original: Original[tuple[Tensor, Tensor]],
        spec: MoE,
        routers: Sequence[RouterStats],
        batch: Batch,
        normalizers: Normalizers,
        sums: Sums,
    ) -> tuple[Tensor, Tensor]:
        balance, z = original(spec, routers, batch, normalizers, sums)
        return scale_gradient(balance, 1 / TP), scale_gradient(z, 1 / TP)


FAULT = Fault(
    number="C06",
    title="gradients of the router losses are 1/tp of the right ones",
    source="NVIDIA/Megatron-LM PR #5047 (9ef8a2a420)",
    mechanism=(
        "with a loss per token the auxiliary gradient is multiplied by a rank's tokens and divided by "
        "the tokens of all ranks"
    ),
    trigger="tp that slices tokens",
    case=make_case("c06", tp=TP, ep=2),
    expected=Expected(
        where=(
            At(term="balance"),
            At(term="z"),
        ),
        causes=(Cause.TERM_SCALE,),
    ),
    inject=inject,
)

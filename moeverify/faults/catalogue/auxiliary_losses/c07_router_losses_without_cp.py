"""Router losses are not multiplied by the cp degree before gradients are averaged over it."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.catalogue.auxiliary_losses.balance import scale_gradient
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide the gradients of both router losses by the cp degree; their values stay right."""
    import torch
    from torch import Tensor

    from moeverify.cases.schema import MoE
    from moeverify.model.router import RouterStats
    from moeverify.train.data import Batch
    from moeverify.train.objective import Normalizers, Sums, router_losses

    @patch.wrap(router_losses)
    def divide_by_cp(
        original: Original[tuple[Tensor, Tensor]],
        spec: MoE,
        routers: Sequence[RouterStats],
        batch: Batch,
        normalizers: Normalizers,
        sums: Sums,
    ) -> tuple[Tensor, Tensor]:
        num_cp_ranks = float(sums.over_sequence(torch.ones((), device=batch.tokens.device)))
        balance, z = original(spec, routers, batch, normalizers, sums)
        return scale_gradient(balance, 1 / num_cp_ranks), scale_gradient(z, 1 / num_cp_ranks)


FAULT = Fault(
    number="C07",
    title="gradients of the router losses are 1/cp of the right ones",
    source="NVIDIA/Megatron-LM PR #2237 (f6e0d425a5)",
    mechanism="the scale of the auxiliary losses lacks the factor cp that the main loss has",
    trigger="context parallelism",
    case=make_case("c07", cp=2),
    expected=Expected(
        where=(At(term="balance"), At(term="z"), At(name="*.moe.router*")), causes=(Cause.TERM_SCALE,)
    ),
    inject=inject,
)

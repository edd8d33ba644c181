"""The balance loss is computed and logged, but the node that would carry its gradient is thrown away."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeverify.case.schema import MoE
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.router import RouterStats
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.train import forward
from moeverify.train.data import Batch
from moeverify.train.objective import Normalizers, Sums, router_losses


def inject() -> None:
    """Leave the balance loss out of the graph; its value is still reported."""
    forward.router_losses = _losses


def _losses(
    spec: MoE, routers: Sequence[RouterStats], batch: Batch, normalizers: Normalizers, sums: Sums
) -> tuple[Tensor, Tensor]:
    balance, z = router_losses(spec, routers, batch, normalizers, sums)
    return balance.detach(), z


FAULT = Fault(
    number="C14",
    title="gradient of the balance loss never flows",
    source="NVIDIA-NeMo/Automodel #1408, PR #1412",
    mechanism="what the autograd function that attaches the loss returns is discarded, so it is not in the graph",
    trigger="any layout",
    case=make_case("c14", dp_shard=2),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.TERM_SCALE,)),
    inject=inject,
)

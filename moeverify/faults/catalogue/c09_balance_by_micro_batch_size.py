"""The gradient of the sequence balance loss shrinks with the number of rows in a micro-batch."""

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
    """Divide the gradient of the balance loss by the rows of the micro-batch; its value stays right."""
    forward.router_losses = _losses


def _losses(
    spec: MoE, routers: Sequence[RouterStats], batch: Batch, normalizers: Normalizers, sums: Sums
) -> tuple[Tensor, Tensor]:
    balance, z = router_losses(spec, routers, batch, normalizers, sums)
    return balance.detach() + (balance - balance.detach()) / len(batch.share.rows), z


FAULT = Fault(
    number="C09",
    title="gradient of the sequence balance loss depends on the micro-batch size",
    source="NVIDIA/Megatron-LM PR #5798 (e3fe5508c9)",
    mechanism="the tokens of one sequence are given where those of the micro-batch are wanted: 1/rows",
    trigger="more than one row in a micro-batch, sequence scope",
    case=make_case("c09", dp_shard=2, data={"batch": 12}),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.TERM_SCALE,)),
    inject=inject,
    notes="six rows a micro-batch, a number that is no degree of the layout",
)

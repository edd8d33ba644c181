"""The balance loss has a coefficient above zero and is not added, since a flag for logging is off."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
    """Compute the router losses and drop the balance part."""
    forward.router_losses = _losses


def _losses(
    spec: MoE, routers: Sequence[RouterStats], batch: Batch, normalizers: Normalizers, sums: Sums
) -> tuple[Tensor, Tensor]:
    balance, z = router_losses(spec, routers, batch, normalizers, sums)
    return torch.zeros_like(balance), z


FAULT = Fault(
    number="C05",
    title="balance loss is skipped when router logits are not asked for",
    source="huggingface/transformers #44242, PR #44284",
    mechanism="the term is only added when a flag for the output is on, whatever its coefficient",
    trigger="any layout",
    case=make_case("c05", dp_shard=2),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.TERM_SCALE,)),
    inject=inject,
)

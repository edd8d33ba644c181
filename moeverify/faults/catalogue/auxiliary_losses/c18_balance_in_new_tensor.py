"""The balance losses of the layers are copied into a new tensor, which has no graph."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Build a tensor from the list of the layers' values."""
    import torch
    from torch import Tensor

    from moeverify.cases.schema import MoE
    from moeverify.model.router import RouterStats
    from moeverify.train.data import Batch
    from moeverify.train.objective import Normalizers, Sums, router_losses

    @patch.wrap(router_losses)
    def copy_values(
        original: Original[tuple[Tensor, Tensor]],
        spec: MoE,
        routers: Sequence[RouterStats],
        batch: Batch,
        normalizers: Normalizers,
        sums: Sums,
    ) -> tuple[Tensor, Tensor]:
        _, z = original(spec, routers, batch, normalizers, sums)
        layers = [original(spec, [stats], batch, normalizers, sums)[0] for stats in routers]
        return torch.tensor([layer.item() for layer in layers], dtype=z.dtype, device=z.device).sum(), z


FAULT = Fault(
    number="C18",
    title="balance loss has no gradient",
    source="laekov/fastmoe #49, PR #50 (28bfe68)",
    mechanism="torch.tensor of the list of the layers' losses copies values and cuts the graph",
    trigger="any layout",
    case=make_case("c18", dp_shard=2),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.TERM_SCALE,)),
    inject=inject,
    notes="computes the same wrong numbers as C14, by another mistake",
)

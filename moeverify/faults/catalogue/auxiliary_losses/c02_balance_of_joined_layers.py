"""The balance loss joins the tokens of all layers before the product, so opposite imbalances cancel."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Average counts and probabilities over the layers, and use these averages for every layer."""
    import torch
    from torch import Tensor

    from moeverify.cases.schema import MoE
    from moeverify.model.router import RouterStats
    from moeverify.train.data import Batch
    from moeverify.train.objective import Normalizers, Sums, router_losses

    @patch.wrap(router_losses)
    def join_layers(
        original: Original[tuple[Tensor, Tensor]],
        spec: MoE,
        routers: Sequence[RouterStats],
        batch: Batch,
        normalizers: Normalizers,
        sums: Sums,
    ) -> tuple[Tensor, Tensor]:
        counts = torch.stack([stats.counts for stats in routers]).to(torch.float64).mean(dim=0)
        probabilities = torch.stack([stats.probability_sum for stats in routers]).mean(dim=0)
        joined = [stats._replace(probability_sum=probabilities, counts=counts) for stats in routers]
        return original(spec, joined, batch, normalizers, sums)


FAULT = Fault(
    number="C02",
    title="balance loss joins the layers before the product of fraction and probability",
    source="huggingface/transformers #31464",
    mechanism="the logits of all layers are concatenated, so imbalances of opposite sign in two layers cancel",
    trigger="any layout, more than one MoE layer",
    case=make_case("c02", dp_shard=2),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.FORWARD,)),
    inject=inject,
    notes="upstream the joined loss is not multiplied by the number of layers; here the scale is kept right",
)

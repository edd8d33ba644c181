"""One term of the loss is normalized by each rank's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide the z loss by the tokens of this rank, times the number of averaged ranks."""
    import torch
    from torch import Tensor

    from moeverify.cases.schema import MoE
    from moeverify.model.router import RouterStats
    from moeverify.train.data import Batch
    from moeverify.train.objective import Normalizers, Sums, router_losses

    @patch.wrap(router_losses)
    def divide_by_own(
        original: Original[tuple[Tensor, Tensor]],
        spec: MoE,
        routers: Sequence[RouterStats],
        batch: Batch,
        normalizers: Normalizers,
        sums: Sums,
    ) -> tuple[Tensor, Tensor]:
        balance, z = original(spec, routers, batch, normalizers, sums)
        own = batch.valid.sum()
        ranks = sums.over_batch(torch.ones_like(own))
        return balance, z * normalizers.num_valid / (own * ranks)


FAULT = Fault(
    number="G12",
    title="a second loss is a mean of the means of the data ranks",
    source="NVIDIA/Megatron-LM issue #7452, item 3",
    mechanism="the term of multi-token prediction is scaled by local over global tokens",
    trigger="data parallelism over unequal token counts",
    case=make_case("g12", dp_shard=2),
    expected=Expected(where=(At(term="z"),), causes=(Cause.SHARE_WEIGHTS,)),
    inject=inject,
    notes="the reference model predicts one token; its z loss stands for the second term",
)

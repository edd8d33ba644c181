"""The router gets no padding mask, so its losses and counters include padding."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Call every MoE block without the mask of valid tokens."""
    from torch import Tensor

    from moeverify.model.moe import MoE
    from moeverify.model.router import RouterStats

    @patch.wrap(MoE.forward)
    def forward_without_mask(
        original: Original[tuple[Tensor, RouterStats]], self: MoE, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, RouterStats]:
        return original(self, x, None)


FAULT = Fault(
    number="C12",
    title="padding counts in the router losses and in the expert counters",
    source="NVIDIA/Megatron-LM #1984, PR #2121; pytorch/torchtitan PR #4594",
    mechanism="the router gets no padding mask, so padding enters both losses and the counts behind the bias",
    trigger="padded rows",
    case=make_case("c12", dp_shard=2),
    expected=Expected(where=(At(term="balance"), At(name="*.moe.router*")), causes=(Cause.PADDING,)),
    inject=inject,
)

"""Tokens are routed by the placement from before an exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.faults.catalogue.expert_placement.moves import make_exchange_case
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from moeverify.parallel.placed_experts import PlacedLayer
    from moeverify.tools.placement.buckets import Bucket


def inject(patch: Patch) -> None:
    """Keep the previous routes of a layer."""
    from moeverify.parallel.expert import AllToAllDispatcher
    from moeverify.parallel.placed_experts import set_placement

    @patch.wrap(set_placement)
    def kept(
        original: Original[PlacedLayer], layer: PlacedLayer, buckets: tuple[Bucket, ...], num_experts: int
    ) -> PlacedLayer:
        dispatcher = layer.moe.dispatcher
        routes = dispatcher.routes if isinstance(dispatcher, AllToAllDispatcher) else None
        changed = original(layer, buckets, num_experts)
        if routes is not None and isinstance(changed.moe.dispatcher, AllToAllDispatcher):
            changed.moe.dispatcher.routes = routes
        return changed


FAULT = Fault(
    number="P06",
    title="tokens are routed by the placement from before an exchange",
    source="vllm-project/vllm #55228",
    mechanism="the map from experts to slots is cached, and an exchange moves weights without it",
    trigger="an exchange of experts that leaves the number of experts on each rank as it was",
    case=make_exchange_case("p06"),
    expected=Expected(where=(At(name="*.moe*"),), causes=(Cause.FORWARD, Cause.PERMUTATION)),
    inject=inject,
)

"""Derived axes, which no layout field sets: products and quotients of the other axes.

- `fsdp` = dp_shard * cp: the ranks over which FSDP shards parameters outside the experts.
- `loss` = dp_replicate * dp_shard * cp: the ranks whose losses add up to the loss of the global batch.
- `efsdp`: the ranks over which FSDP shards experts, after ep and etp have divided them.
- `edp`: under DDP, the ranks that hold copies of the same experts.
"""

from __future__ import annotations

from moeverify.cases.axes.axis import Axis, Divided, in_moe_blocks
from moeverify.cases.axes.borrowed import count_holders, has_experts
from moeverify.cases.axes.expert_placement import is_placed
from moeverify.cases.schema import Case
from moeverify.results.checks import Kind


def _shards_parameters(case: Case) -> bool:
    return case.layout.data_parallel != "ddp"


def _shards_experts(case: Case) -> bool:
    # With one data rank nothing is sharded, and several tp ranks may hold the same experts. Placed experts
    # are whole on each rank.
    if is_placed(case.layout):
        return False
    return has_experts(case) and case.layout.ep > 1 and case.layout.data_ranks * case.layout.cp > 1


FSDP = Axis(
    name="fsdp",
    size=lambda layout: layout.dp_shard * layout.cp,
    views=lambda _: ("dense",),
    divides=Divided(Kind.INITIAL_WEIGHT, "others", _shards_parameters),
    is_factor=False,
    is_union=True,
)

LOSS = Axis(
    name="loss",
    size=lambda layout: layout.data_ranks * layout.cp,
    views=lambda _: ("loss",),
    label="all data ranks",
    is_union=True,
)

EFSDP = Axis(
    name="efsdp",
    size=count_holders,
    views=lambda layout: () if layout.data_parallel == "ddp" else ("sparse",),
    divides=Divided(Kind.INITIAL_WEIGHT, "experts", _shards_experts),
    places_experts=True,
    affects=in_moe_blocks,
)

EDP = Axis(
    name="edp",
    size=count_holders,
    views=lambda layout: ("sparse",) if layout.data_parallel == "ddp" else (),
    places_experts=True,
    affects=in_moe_blocks,
)

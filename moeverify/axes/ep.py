"""The axis of expert parallelism: its ranks hold other experts, and tokens travel between them.

It adds no ranks but regroups those of other axes within a pipeline stage (`moeverify.axes.borrowed`).
"""

from __future__ import annotations

from moeverify.axes.axis import Axis, Divided, Size, in_moe_blocks
from moeverify.axes.borrowed import borrowed_ranks, has_experts, needs_experts
from moeverify.results.checks import Kind

AXIS = Axis(
    name="ep",
    degree="ep",
    size=lambda layout: layout.ep,
    views=lambda _: ("sparse",),
    divides=Divided(Kind.INITIAL_WEIGHT, "experts", has_experts),
    sizes=(Size("model.moe.num_experts", "experts"),),
    places_experts=True,
    rules=(needs_experts("ep"), borrowed_ranks),
    affects=in_moe_blocks,
    is_varied=True,
)

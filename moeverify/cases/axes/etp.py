"""The axis of expert tensor parallelism: its ranks hold shards of the same experts' hidden units.

Its ranks are the ranks of tp, or borrowed like the ranks of ep. The default of `etp` is `tp` without ep,
else 1.
"""

from __future__ import annotations

from moeverify.cases.axes.axis import Axis, Divided, Size, in_experts
from moeverify.cases.axes.borrowed import has_experts, needs_experts
from moeverify.results.checks import Kind

AXIS = Axis(
    name="etp",
    degree="etp",
    size=lambda layout: layout.expert_tp,
    views=lambda _: ("sparse",),
    divides=Divided(Kind.INITIAL_WEIGHT, "experts", has_experts),
    sizes=(Size("model.moe.expert_hidden", "the width of an expert"),),
    places_experts=True,
    rules=(needs_experts("etp"),),
    affects=in_experts,
)

"""The axis of expert parallelism: its ranks hold different experts and exchange tokens.

It adds no ranks. It regroups ranks of other axes within a pipeline stage (`moeverify.cases.axes.borrowed`).
"""

from __future__ import annotations

from moeverify.cases.axes.axis import Axis, Divided, Size, in_moe_blocks
from moeverify.cases.axes.borrowed import borrowed_ranks, has_experts, needs_experts
from moeverify.cases.axes.expert_placement import PLACEMENT_RULES, find_placement
from moeverify.cases.schema import Case
from moeverify.results.checks import Kind


def _divides_experts(case: Case) -> bool:
    """Return whether the ranks hold different experts; a placement may put all experts on all ranks."""
    model = case.recipe.model.reference
    placement = None if model is None or model.moe is None else find_placement(case.layout, model)
    if placement is None:
        return has_experts(case)
    return any(len(set(map(frozenset, matrix))) > 1 for matrix in placement.matrices)


AXIS = Axis(
    name="ep",
    degree="ep",
    size=lambda layout: layout.ep,
    views=lambda _: ("sparse",),
    divides=Divided(Kind.INITIAL_WEIGHT, "experts", _divides_experts),
    sizes=(Size("model.moe.num_experts", "experts", unless="placement"),),
    places_experts=True,
    rules=(needs_experts("ep"), borrowed_ranks, *PLACEMENT_RULES),
    affects=in_moe_blocks,
    is_varied=True,
)

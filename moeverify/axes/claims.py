"""What a layout claims to divide, axis by axis; a check holds it to that."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.axes.claim import Claim, Part
from moeverify.axes.mesh import MeshPlan, View
from moeverify.case.schema import Case, CustomModel


def axis_claims(case: Case, plan: MeshPlan) -> Mapping[str, Claim]:
    """Return, for each axis of more than one rank, the tensors that it divides and its groups of ranks."""
    layout, model = case.layout, case.recipe.model
    claims: dict[str, Claim] = {}

    def claim(view: View, axis: str, kind: str, part: Part = "all") -> None:
        if view.axes.get(axis, 1) > 1:
            claims[axis] = Claim(kind, view.groups(axis), part)

    # A user's own loss may be nothing but a sum.
    if not isinstance(model, CustomModel) or model.loss is None:
        for axis in ("dp_replicate", "dp_shard", "cp"):
            claim(plan.data, axis, "token_loss")
    if layout.parallelize is not None:
        return claims  # how a user's own code divides parameters is not ours to say
    claim(plan.data, "pp", "initial_weight")
    if layout.data_parallel != "ddp":
        claim(plan.dense, "fsdp", "initial_weight", "others")
    claim(plan.dense, "tp", "initial_weight", "others")
    has_experts = not isinstance(model, CustomModel) and model.moe is not None
    if has_experts:
        claim(plan.sparse, "etp", "initial_weight", "experts")
    if has_experts and layout.ep > 1:
        claim(plan.sparse, "ep", "initial_weight", "experts")
        # Over one data rank nothing is sharded, and ranks of tp may hold the same experts.
        if layout.data_ranks * layout.cp > 1:
            claim(plan.sparse, "efsdp", "initial_weight", "experts")
    return claims

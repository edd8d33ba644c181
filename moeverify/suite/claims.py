"""What a layout claims to divide, axis by axis; a check holds it to that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.case.schema import Case, ForeignModel
from moeverify.layout.mesh import MeshPlan, View

Claims = Mapping[str, tuple[str, Sequence[Sequence[int]]]]


def axis_claims(case: Case, plan: MeshPlan) -> Claims:
    """Return, for each axis of more than one rank, the kind of tensors it divides and its groups of ranks."""
    layout, model = case.layout, case.recipe.model
    claims: dict[str, tuple[str, Sequence[Sequence[int]]]] = {}

    def claim(view: View, axis: str, kind: str, label: str | None = None) -> None:
        if view.axes.get(axis, 1) > 1:
            claims[label or axis] = (kind, view.groups(axis))

    # A user's own loss may be nothing but a sum.
    if not isinstance(model, ForeignModel) or model.loss is None:
        for axis in ("dp_replicate", "dp_shard", "cp"):
            claim(plan.data, axis, "token_loss")
    if layout.parallelize is not None:
        return claims  # how a user's own code divides parameters is not ours to say
    claim(plan.data, "pp", "initial_weight")
    if layout.data_parallel != "ddp":
        claim(plan.dense, "fsdp", "initial_weight")
    claim(plan.dense, "tp", "initial_weight")
    if layout.ep > 1:
        claim(plan.sparse, "ep", "initial_weight")
        claim(plan.sparse, "efsdp", "initial_weight")
    return claims

"""With top_k 1, the weights are normalized over the tokens of the rank instead of over the choices."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Drop the dim of the single choice, then sum over the last dim."""
    from torch import Tensor

    from moeverify.model.router import Router

    @patch.wrap(Router.weigh)
    def weigh_over_tokens(original: Original[Tensor], self: Router, chosen_scores: Tensor) -> Tensor:
        if self.spec.top_k > 1:
            return original(self, chosen_scores)
        tokens = chosen_scores.flatten()
        normalized = tokens / tokens.abs().sum(dim=-1, keepdim=True)
        return normalized.view_as(chosen_scores) * self.spec.route_scale


FAULT = Fault(
    number="B12",
    title="with top_k 1 combine weights are normalized over the tokens of a rank",
    source="databricks/megablocks PR #87",
    mechanism="max() drops the dim of the choices, so the norm over the last dim runs over tokens",
    trigger="top_k 1 with renormalized weights; depends on how many tokens a rank has",
    case=make_case("b12", preset="stress-tied", moe={"renormalize": True}, dp_shard=2, ep=2),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.FORWARD,)),
    inject=inject,
)

"""The weights of the chosen experts are not divided by their sum."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Scale the chosen scores without renormalization."""
    from moeverify.model.router import Router

    patch.replace(Router.weigh)(lambda self, chosen_scores: chosen_scores * self.spec.route_scale)


FAULT = Fault(
    number="B14",
    title="the chosen experts' weights are not renormalized",
    source="pytorch/torchtitan PR #1419 (93a236ccd), PR #2319 (41753c67b)",
    mechanism="the model family divides the chosen scores by their sum, this router does not",
    trigger="any layout, with a family that renormalizes",
    case=make_case("b14", preset="tiny-deepseek-v3-routing", dp_shard=2, ep=2),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.FORWARD,)),
    inject=inject,
    notes="the missing gate bias of the same sources belongs to the conversion of checkpoints",
)

"""Each tp rank routes its own tokens, and the router's partial gradient is treated as complete."""

from __future__ import annotations

from moeverify.faults.catalogue.routing.unreduced import leave_unreduced
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Remove all router parameters from those whose gradients are summed over tp."""
    from moeverify.model.router import Router

    leave_unreduced(patch, lambda module: list(module.parameters()) if isinstance(module, Router) else [])


FAULT = Fault(
    number="B01",
    title="the router's gradient is never summed over tp",
    source="pytorch/torchtitan issue #2387, PR #2416 (de329200b), PR #2388",
    mechanism="the router's output becomes a local tensor whose partial gradient is labelled as replicated",
    trigger="tp with expert parallelism that borrows it",
    case=make_case("b01", tp=2, ep=2),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
)

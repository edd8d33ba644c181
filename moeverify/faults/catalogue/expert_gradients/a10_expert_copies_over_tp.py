"""Experts not sharded by tp are treated like dense weights: their gradients are not reduced over tp."""

from __future__ import annotations

from moeverify.faults.catalogue.routing.unreduced import leave_unreduced
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Remove the experts from the parameters that are summed over tp."""
    from moeverify.model.experts import Experts

    leave_unreduced(patch, lambda module: list(module.parameters()) if isinstance(module, Experts) else [])


FAULT = Fault(
    number="A10",
    title="expert gradients are reduced like dense ones where etp is not tp",
    source="NVIDIA/Megatron-LM #1628, PR #1622, PR #5916",
    mechanism="experts with ep 1 and etp unequal to tp are taken for dense weights, whose group leaves tp out",
    trigger="etp 1 with tp above 1 and ep 1",
    case=make_case("a10", tp=2, etp=1),
    expected=Expected(where=(At(name="*.moe.experts*", axis="tp"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
)

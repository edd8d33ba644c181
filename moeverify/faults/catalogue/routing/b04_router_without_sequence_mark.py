"""With sequence parallelism the router sees a slice of the tokens, but its weight is not marked so."""

from __future__ import annotations

from moeverify.faults.catalogue.routing.unreduced import leave_unreduced
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Remove router weights from the parameters whose gradients are summed over tp."""
    from moeverify.model.router import Router

    leave_unreduced(patch, lambda module: [module.weight] if isinstance(module, Router) else [])


FAULT = Fault(
    number="B04",
    title="the router's weight lacks the mark of sequence parallelism",
    source="NVIDIA/Megatron-LM issue #599, PR #619",
    mechanism="parameters without the attribute are left out of the all-reduce over tp that sequence slices need",
    trigger="tp with sequence parallelism and experts",
    case=make_case("b04", tp=2, ep=2, sequence_parallel=True),
    expected=Expected(where=(At(name="*.moe.router.weight"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
)

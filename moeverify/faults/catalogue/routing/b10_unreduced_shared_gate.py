"""The shared expert's gate is replicated and sees a slice of the tokens; its gradient is not summed."""

from __future__ import annotations

from moeverify.faults.catalogue.routing.unreduced import leave_unreduced
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Remove shared gates from the parameters whose gradients are summed over tp."""
    from moeverify.model.moe import MoE

    leave_unreduced(
        patch,
        lambda module: (
            [module.shared_gate.weight] if isinstance(module, MoE) and module.shared_gate is not None else []
        ),
    )


FAULT = Fault(
    number="B10",
    title="the gradient of the shared expert's gate is not summed over tp",
    source="alibaba/Pai-Megatron-Patch issue #397",
    mechanism="a replicated linear layer on a sequence shard is missing from the list of tp reductions",
    trigger="tp with sequence parallelism and a gated shared expert",
    case=make_case("b10", tp=2, ep=2, sequence_parallel=True),
    expected=Expected(where=(At(name="*.moe.shared_gate*"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
)

"""The norm counts experts only on the first tp rank, as if the others held copies like dense weights."""

from __future__ import annotations

from moeverify.faults.catalogue.gradient_norm.measured import change_gradients, expert_mesh
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Omit the experts on tp ranks above 0, which in this case are the ep ranks."""
    from torch import Tensor

    def disown(gradient: Tensor) -> Tensor:
        mesh = expert_mesh(gradient)
        return gradient * 0 if mesh is not None and mesh.get_local_rank("ep") > 0 else gradient

    change_gradients(patch, disown)


FAULT = Fault(
    number="H01",
    title="the gradient norm misses the experts of all but one tp rank",
    source="NVIDIA/Megatron-LM PR #5916; radixark/Megatron-LM PR #80",
    mechanism="the rule that a dense parameter is counted by tp rank 0 is applied to experts, which differ",
    trigger="tp with expert parallelism and etp 1",
    case=make_case("h01", tp=2, ep=2),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM),), causes=(Cause.NORM,)),
    inject=inject,
)

"""The norm counts experts on the first tp rank only, as if the others held copies as they do of dense weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage
from moeverify.train import clipping


def inject() -> None:
    """Count no experts on ranks above 0 of tp, which in the case are the ranks of ep."""

    def get_total_norm(tensors: Iterable[Tensor], **arguments: Any) -> Tensor:
        owned = [gradient * 0 if _is_disowned(gradient) else gradient for gradient in tensors]
        return original(owned, **arguments)

    original = clipping.get_total_norm
    clipping.get_total_norm = get_total_norm


def _is_disowned(gradient: Tensor) -> bool:
    if not isinstance(gradient, DTensor):
        return False
    mesh = gradient.device_mesh
    return "ep" in (mesh.mesh_dim_names or ()) and mesh.get_local_rank("ep") > 0


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

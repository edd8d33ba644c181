"""The norm takes the experts that are here for all experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.layout.placement import local_part
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage
from moeverify.train import clipping


def inject() -> None:
    """Take the norm of experts from local shards and reduce it over no rank."""

    def get_total_norm(tensors: Iterable[Tensor], **arguments: Any) -> Tensor:
        known = [local_part(gradient) if _is_expert(gradient) else gradient for gradient in tensors]
        return original(known, **arguments)

    original = clipping.get_total_norm
    clipping.get_total_norm = get_total_norm


def _is_expert(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and "ep" in (gradient.device_mesh.mesh_dim_names or ())


FAULT = Fault(
    number="H07",
    title="the gradient norm misses the experts of other ranks",
    source="foundation-model-stack/fms-acceleration #109, PR #157",
    mechanism="FSDP's clip knows its own shards only; expert DTensors count as they are on each rank",
    trigger="FSDP with expert parallelism",
    case=make_case("h07", dp_shard=2, ep=2),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM),), causes=(Cause.NORM,)),
    inject=inject,
)

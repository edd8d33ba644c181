"""FSDP2's mesh is built without the axis of replicas, which therefore never exchange gradients."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.parallel import plan
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Give FSDP2 the mesh of shards alone, for dense parameters and for experts."""

    def shard_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
        return mesh[axis]

    plan._shard_mesh = shard_mesh


FAULT = Fault(
    number="A13",
    title="HSDP replicas of a MoE model never reduce their gradients",
    source="NVIDIA-NeMo/Automodel PR #3135",
    mechanism="the MoE parallelizer builds its mesh without dp_replicate: each replica trains on its own rows",
    trigger="HSDP with expert parallelism",
    case=make_case("a13", dp_replicate=2, dp_shard=2, ep=2),
    expected=Expected(where=(At(axis="dp_replicate"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
)

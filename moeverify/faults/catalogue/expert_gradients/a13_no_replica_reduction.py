"""FSDP2's mesh lacks the replica axis, so replicas never exchange gradients."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Give FSDP2 only the shard mesh, for dense parameters and for experts."""
    from moeverify.parallel.plan import shard_mesh

    patch.replace(shard_mesh)(lambda mesh, axis: mesh[axis])


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

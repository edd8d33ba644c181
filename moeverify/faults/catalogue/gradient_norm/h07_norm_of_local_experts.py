"""The norm counts only the local experts."""

from __future__ import annotations

from moeverify.faults.catalogue.gradient_norm.measured import change_gradients, expert_mesh
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Compute the norm of experts from local shards without a reduction."""
    from moeverify.parallel.regions.placement import local_part

    change_gradients(
        patch, lambda gradient: gradient if expert_mesh(gradient) is None else local_part(gradient)
    )


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

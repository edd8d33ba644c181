"""The gradient norm covers only a rank's own shard."""

from __future__ import annotations

from moeverify.faults.catalogue.gradient_norm.measured import change_gradients
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Compute the norm of local shards without a reduction."""
    from moeverify.parallel.regions.placement import local_part

    change_gradients(patch, local_part)


FAULT = Fault(
    number="H03",
    title="each rank clips by the norm of its own shard",
    source="RLinf/RLinf PR #1558",
    mechanism="the mesh axis is looked up under a name that it does not have, so the norm is never reduced",
    trigger="FSDP",
    case=make_case("h03", preset="tiny-gpt", dp_shard=2),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM),), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
)

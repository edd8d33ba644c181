"""Expert gradients are divided once too often by the number of ranks with copies."""

from __future__ import annotations

from moeverify.faults.catalogue.expert_gradients.reductions import divide_by
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide expert gradients by the expert-data-parallel ranks, in addition to the right divisor."""
    divide_by(patch, lambda block, mesh, num_loss_ranks: num_loss_ranks * mesh.size())


FAULT = Fault(
    number="A04",
    title="expert gradients are divided twice",
    source="deepspeedai/DeepSpeed PR #4957",
    mechanism="divided once by hand and once by the all-reduce: 1/edp too small",
    trigger="sharded data parallelism with expert parallelism and several ranks an expert",
    case=make_case("a04", dp_shard=4, ep=2),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SCALE,)),
    inject=inject,
)

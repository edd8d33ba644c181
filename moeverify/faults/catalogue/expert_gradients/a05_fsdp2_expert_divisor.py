"""FSDP2 divides expert gradients by the ranks that hold the experts, not by those that share the loss."""

from __future__ import annotations

from moeverify.faults.catalogue.expert_gradients.reductions import divide_by
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Shard experts without a custom divisor."""
    divide_by(patch, lambda block, mesh, num_loss_ranks: mesh.size())


FAULT = Fault(
    number="A05",
    title="expert gradients are ep times too large under FSDP2",
    source="pytorch/pytorch #160285; pytorch/torchtitan PR #1551 (59e57a4bb)",
    mechanism="fully_shard on the experts averages over the small expert mesh instead of all data ranks",
    trigger="FSDP2 with expert parallelism",
    case=make_case("a05", dp_shard=4, ep=2),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SCALE,)),
    inject=inject,
)

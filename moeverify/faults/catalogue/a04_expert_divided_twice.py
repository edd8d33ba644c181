"""Expert gradients are divided by the ranks that hold copies of them once more than they should."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.parallel import fsdp2
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Divide expert gradients by the expert-data-parallel ranks again, beside the right divisor."""

    def shard_experts(block: nn.Module, mesh: DeviceMesh, num_loss_ranks: int, *rest: Any) -> None:
        original(block, mesh, num_loss_ranks * mesh.size(), *rest)

    original = fsdp2._shard_experts
    fsdp2._shard_experts = shard_experts


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

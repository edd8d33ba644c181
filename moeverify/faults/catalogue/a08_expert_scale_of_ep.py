"""Expert gradients are scaled by 1/ep, which is right only where the experts' tp is the model's."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.experts import Experts
from moeverify.parallel import fsdp2
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Divide expert gradients by edp * ep, in the place of the data-parallel ranks."""

    def shard_experts(block: nn.Module, mesh: DeviceMesh, num_loss_ranks: int, *rest: Any) -> None:
        for module in block.modules():
            if isinstance(module, Experts):
                weight = module.gate
                assert isinstance(weight, DTensor)
                original(block, mesh, mesh.size() * weight.device_mesh["ep"].size(), *rest)

    original = fsdp2._shard_experts
    fsdp2._shard_experts = shard_experts


FAULT = Fault(
    number="A08",
    title="expert gradients are scaled by 1/ep where the tp of experts is not the tp of the model",
    source="NVIDIA/Megatron-LM !2564 (4f8974a400)",
    mechanism="an average over edp and then 1/ep; right is edp/dp, which differs by etp/tp",
    trigger="sharded data parallelism with tp, ep and etp unlike tp",
    case=make_case("a08", dp_shard=2, tp=2, ep=2, etp=1),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SCALE,)),
    inject=inject,
)

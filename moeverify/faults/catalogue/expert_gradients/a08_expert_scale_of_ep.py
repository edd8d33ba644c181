"""Expert gradients are scaled by 1/ep, which is right only if etp equals tp."""

from __future__ import annotations

from moeverify.faults.catalogue.expert_gradients.reductions import divide_by
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide expert gradients by edp * ep instead of the data-parallel ranks."""
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from moeverify.model.experts import Experts

    def count_ranks(block: nn.Module, mesh: DeviceMesh, num_loss_ranks: int) -> int:
        weights = [module.gate for module in block.modules() if isinstance(module, Experts)]
        sharded = [weight for weight in weights if isinstance(weight, DTensor)]
        return mesh.size() * sharded[0].device_mesh["ep"].size() if sharded else num_loss_ranks

    divide_by(patch, count_ranks)


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

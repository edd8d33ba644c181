"""Expert gradients are averaged over the expert-data-parallel ranks only."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Shard experts with the default average of the reduce-scatter over its own ranks."""
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from moeverify.model.experts import Experts
    from moeverify.parallel.fsdp2 import shard_experts

    @patch.replace(shard_experts)
    def average(
        block: nn.Module, mesh: DeviceMesh, num_loss_ranks: int, policy: MixedPrecisionPolicy
    ) -> None:
        for module in block.modules():
            if isinstance(module, Experts):
                fully_shard(module, mesh=mesh, mp_policy=policy)


FAULT = Fault(
    number="A07",
    title="expert gradients are averaged over the expert-data-parallel ranks only",
    source="NVIDIA/Megatron-LM PR #5956, issue #5656",
    mechanism="the reduce-scatter is an AVG over the expert mesh, without a divisor for ep: ep times too large",
    trigger="fully sharded data parallelism with expert parallelism, here with ep borrowed from cp",
    case=make_case("a07", dp_shard=2, cp=2, ep=2),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SCALE,)),
    inject=inject,
    notes="first blamed on NCCL's rounding, with the proposal to widen the tolerance",
)

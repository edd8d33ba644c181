"""The same expert parallelism with a mistake, which moeverify finds: see docs/verify-your-own-model.md."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from my_moe.model import MoE, spread_experts


def parallelize(model: MoE, mesh: DeviceMesh) -> MoE:
    """Leave the experts' gradients as sums over the ranks, while all others are averages."""
    weights = spread_experts(model, mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"], ignored_params=set(weights))
    return model

"""Expert parallelism as megablocks does it: its experts over the ranks of the ep axis, by its own all-to-all.

The package gives each rank its rows of the stacked weights, exchanges counts, then tokens, and multiplies the
experts' gradients by 1/ep, so that an average over the ranks which hold the same experts completes them.
Placement: as in its users, w1, v1 and w2 become DTensors, Shard(0) on ep.

Source: megablocks 0.10.0, layers/moe.py (parallel_forward_once) and layers/mlp.py (scale_gradient).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moeverify.case.schema import MoE
from moeverify.model.megablocks.block import DroplessMoE
from moeverify.model.megablocks.losses import OwnLosses

_STACKED = ("w1", "v1", "w2")


def collect_own_losses(model: nn.Module, spec: MoE, num_shares: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that gives a micro-batch's addends of the package's own balance and z losses.

    `num_shares` is how many micro-batches of all ranks the mean is taken over.
    """
    own = OwnLosses(model, spec)

    def collect() -> tuple[Tensor, Tensor]:
        balance, z = own.collect()
        return balance / num_shares, z / num_shares

    return collect


def apply_megablocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let the package divide the experts of every block over the axis `ep` of the mesh, in place."""
    for module in list(model.modules()):
        if isinstance(module, DroplessMoE):
            module.divide_experts(mesh.get_group("ep"))
            experts = module.experts.mlp
            for name in _STACKED:
                local = getattr(experts, name).detach()
                sharded = DTensor.from_local(local, mesh["ep"], [Shard(0)], run_check=False)
                experts.register_parameter(name, nn.Parameter(sharded))

"""What faults of this class share: expert gradients that are reduced or divided otherwise than the layout asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moeverify.faults.patch import Original, Patch

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.parallel.gradients import Reduction
    from moeverify.parallel.meshes import Meshes


def change_reductions(patch: Patch, change: Callable[[Reduction, Meshes], Reduction]) -> None:
    """Replace each reduction of expert gradients, as the plan has it, by what `change` makes of it."""
    from torch import Tensor

    from moeverify.case.schema import Layout
    from moeverify.parallel.plan import expert_reductions

    @patch.wrap(expert_reductions)
    def changed(
        original: Original[list[Reduction]], experts: Sequence[Tensor], layout: Layout, meshes: Meshes
    ) -> list[Reduction]:
        return [change(reduction, meshes) for reduction in original(experts, layout, meshes)]


def divide_by(patch: Patch, choose: Callable[[nn.Module, DeviceMesh, int], int]) -> None:
    """Let FSDP2 divide expert gradients by `choose(block, mesh, num_loss_ranks)`, where the last would be right.

    `mesh` has the ranks that share an expert's shards or copies.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from moeverify.parallel.fsdp2 import shard_experts

    @patch.wrap(shard_experts)
    def divided(
        original: Original[None],
        block: nn.Module,
        mesh: DeviceMesh,
        num_loss_ranks: int,
        policy: MixedPrecisionPolicy,
    ) -> None:
        original(block, mesh, choose(block, mesh, num_loss_ranks), policy)

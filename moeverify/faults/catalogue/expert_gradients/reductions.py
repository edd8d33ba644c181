"""Helpers of this class: changed reductions and divisors of expert gradients."""

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
    """Replace each planned reduction of expert gradients by `change(reduction, meshes)`."""
    from torch import Tensor

    from moeverify.cases.schema import Layout
    from moeverify.parallel.plan import expert_reductions

    @patch.wrap(expert_reductions)
    def changed(
        original: Original[list[Reduction]], experts: Sequence[Tensor], layout: Layout, meshes: Meshes
    ) -> list[Reduction]:
        return [change(reduction, meshes) for reduction in original(experts, layout, meshes)]


def divide_by(patch: Patch, choose: Callable[[nn.Module, DeviceMesh, int], int]) -> None:
    """Let FSDP2 divide expert gradients by `choose(block, mesh, num_loss_ranks)`.

    The right divisor is `num_loss_ranks`. `mesh` contains the ranks that share an expert's shards or
    copies.
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

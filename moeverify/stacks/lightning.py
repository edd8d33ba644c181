"""Lightning Fabric: any model under its DDPStrategy or ModelParallelStrategy (FSDP2 and a tp plan).

Loss, micro-batches, clip and step use Fabric. A case names `parallelize` and needs no code:

    layout:
      dp_shard: 2
      tp: 2
      parallelize: "moeverify.stacks.lightning:parallelize"
      arguments: {blocks: "layers.*", plan: {"layers.*.up": colwise, "layers.*.down": rowwise}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from moeverify.errors import CaseError, Problem
from moeverify.stacks import torch_native
from moeverify.stacks.framework import import_framework, refuse_axes
from moeverify.stacks.loop import FrameworkLoop
from moeverify.train.parallelize_custom import ParallelizedCustomModel

# The first release whose ModelParallelStrategy works in Fabric under torch 2.11.
LEAST = "2.5.0"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[nn.Module], Optimizer],
    blocks: str = "",
    plan: Mapping[str, str] | None = None,
    precision: str | None = None,
) -> ParallelizedCustomModel:
    """Return a model set up by Fabric: DDP over `dp_replicate`, or FSDP2 over `dp_shard` and `tp` by a plan.

    `blocks` and `plan` are as in `moeverify.stacks.torch_native`. `precision` is Fabric's. Collective: all
    ranks.

    Raises: CaseError when Fabric does not support the combination of axes, or a name matches no module.
    """
    import_framework("lightning", least=LEAST)
    sizes = {axis: mesh[axis].size() for axis in ("dp_replicate", "dp_shard", "tp")}
    problems = refuse_axes(mesh, ("cp",), "Fabric does not divide a model")
    if sizes["dp_replicate"] > 1 and sizes["dp_shard"] * sizes["tp"] > 1:
        message = "Fabric's ModelParallelStrategy has one axis of data parallelism, which shards"
        problems.append(Problem(message, path="layout.dp_replicate", remedy="remove layout.dp_replicate"))
    if problems:
        raise CaseError(problems)
    torch_native.refuse_unknown_modules(model, blocks, plan or {})
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    def divide(module: nn.Module, own_mesh: DeviceMesh) -> nn.Module:
        if sizes["tp"] > 1:
            torch_native.apply_plan(module, own_mesh["tensor_parallel"], plan or {})
        if sizes["dp_shard"] > 1:
            torch_native.shard_blocks(module, own_mesh["data_parallel"], blocks)
        return module

    strategy: Any = DDPStrategy()
    if sizes["dp_replicate"] == 1:
        strategy = ModelParallelStrategy(
            divide, data_parallel_size=sizes["dp_shard"], tensor_parallel_size=sizes["tp"]
        )
    devices: dict[str, Any] = {"accelerator": mesh.device_type, "devices": mesh.size()}
    fabric = Fabric(**devices, strategy=strategy, precision=precision, plugins=_make_environment(mesh))
    fabric.launch()
    prepared = fabric.setup_module(model)
    optimizer = make_optimizer(prepared)
    wrapped = fabric.setup_optimizers(optimizer)

    def accumulate(last: bool) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = fabric.no_backward_sync(prepared, enabled=not last)
        return context

    def clip_by_norm(limit: float) -> Any:
        return fabric.clip_gradients(prepared, wrapped, max_norm=limit)

    engine = FrameworkLoop(optimizer, wrapped, fabric.backward, clip_by_norm)
    return ParallelizedCustomModel(prepared, engine=engine, accumulate=accumulate)


def _make_environment(mesh: DeviceMesh) -> Any:
    """Return a Fabric environment for ranks that already run."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    rank, num_ranks = mesh.get_rank(), mesh.size()

    class StartedRanks(LightningEnvironment):  # type: ignore[misc]  # mypy does not follow optional frameworks
        """Ranks that moeverify has started on this node."""

        @property
        def creates_processes_externally(self) -> bool:
            return True

        def world_size(self) -> int:
            return num_ranks

        def set_world_size(self, size: int) -> None:
            pass

        def global_rank(self) -> int:
            return rank

        def set_global_rank(self, rank: int) -> None:
            pass

        def local_rank(self) -> int:
            return rank

        def node_rank(self) -> int:
            return 0

    return StartedRanks()

"""Hugging Face accelerate: any model under its FSDP2 or under the DDP that it wraps.

`Accelerator.prepare` receives the model and the recipe's optimizer. Loss, micro-batches, norm, clip and
step use the Accelerator like a training loop written for it. A case names `parallelize` and needs no code:

    layout:
      dp_shard: 2
      parallelize: "moeverify.stacks.accelerate:parallelize"
      arguments: {auto_wrap_policy: transformer_based_wrap, transformer_cls_names_to_wrap: [Block]}
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from moeverify.errors import CaseError, Problem
from moeverify.stacks.environment import kept_environment
from moeverify.stacks.framework import import_framework, refuse_axes, refuse_unknown_arguments
from moeverify.stacks.loop import FrameworkLoop
from moeverify.train.parallelize_custom import ParallelizedCustomModel

# The first release that builds its mesh from a ParallelismConfig.
LEAST = "1.10.0"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[nn.Module], Optimizer],
    mixed_precision: str | None = None,
    **arguments: Any,
) -> ParallelizedCustomModel:
    """Return a model and optimizer prepared by accelerate: FSDP2 over `dp_shard`, DDP over `dp_replicate`.

    `arguments` are fields of accelerate's FullyShardedDataParallelPlugin. Collective: all ranks.

    Raises: CaseError when accelerate does not support an axis for an existing model, or an argument is
    unknown.
    """
    import_framework("accelerate", least=LEAST)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    problems = refuse_axes(mesh, ("tp", "cp"), "accelerate does not divide a model that is built")
    problems += refuse_unknown_arguments(FullyShardedDataParallelPlugin, arguments)
    replicas, shards = mesh["dp_replicate"].size(), mesh["dp_shard"].size()
    if shards == 1 and arguments:
        message = (
            "accelerate's FSDP2 needs dp_shard of more than one rank; without it the model is wrapped by DDP"
        )
        remedy = "set layout.dp_shard, or remove the arguments"
        problems.append(Problem(message, path="layout.arguments", remedy=remedy))
    if problems:
        raise CaseError(problems)
    with kept_environment():  # transformers reads ACCELERATE_USE_FSDP on loading
        # The state is a singleton of the process, and this function is called once per program.
        AcceleratorState._reset_state(reset_partial_state=True)
        is_cpu = mesh.device_type == "cpu"
        state = PartialState(cpu=is_cpu)
        if is_cpu and shards > 1:
            # accelerate 1.15 (AcceleratorState.__init__) allows FSDP only on devices, while FSDP2 of torch
            # also runs on CPUs.
            state.distributed_type = DistributedType.MULTI_GPU
        sizes = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
        accelerator = Accelerator(
            cpu=is_cpu,
            mixed_precision=mixed_precision,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **arguments) if shards > 1 else None,
            parallelism_config=sizes if shards > 1 else None,
        )
        prepared, optimizer = accelerator.prepare(model, make_optimizer(model))

    def accumulate(last: bool) -> AbstractContextManager[object]:
        if shards > 1:
            prepared.set_requires_gradient_sync(last)
        return nullcontext() if last else accelerator.no_sync(prepared)

    def clip_by_norm(limit: float) -> Any:
        return accelerator.clip_grad_norm_(prepared.parameters(), limit)

    engine = FrameworkLoop(optimizer.optimizer, optimizer, accelerator.backward, clip_by_norm)
    return ParallelizedCustomModel(prepared, engine=engine, accumulate=accumulate)

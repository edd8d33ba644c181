"""DeepSpeed: any model under its engine, with ZeRO stage 0 to 3, and its own expert parallelism.

Loss, micro-batches, clip and step use the engine. DeepSpeed does not support float64, so a recipe needs
`precision: float32`. Under ZeRO stage 3 no whole parameter is kept: every rank compares its own partition
in place, without a gather. A case names `parallelize` and needs no code:

    layout: {dp_shard: 2, parallelize: "moeverify.stacks.deepspeed:parallelize", arguments: {stage: 2}}
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer as TorchOptimizer

from moeverify.errors import CaseError, Problem
from moeverify.parallel.regions.local_shard import LocalShard, logical_name
from moeverify.parallel.regions.region import Region
from moeverify.stacks.deepspeed_loop import DeepSpeedLoop
from moeverify.stacks.deepspeed_moe import build_again, leave_reductions_to_gloo, split_groups
from moeverify.stacks.framework import import_framework, refuse_axes
from moeverify.train.parallelize_custom import ParallelizedCustomModel


class PartitionedModel(ParallelizedCustomModel):
    """Model in which each parameter has a partition in `ds_tensor`. See `ParallelizedCustomModel`."""

    def list_shards(self, whole: Mapping[str, Tensor]) -> list[LocalShard]:
        """Return this rank's partition of each parameter, without the padding at the end."""
        shards = []
        for name, parameter in self.model.named_parameters():
            partition: Any = parameter.ds_tensor  # type: ignore[attr-defined]  # set by ZeRO-3
            start = dist.get_rank(parameter.ds_process_group) * partition.numel()  # type: ignore[attr-defined]
            stop = min(start + partition.numel(), parameter.ds_numel)  # type: ignore[attr-defined]
            if stop > start:
                region = Region.run(tuple(parameter.ds_shape), start, stop)  # type: ignore[attr-defined]
                partition.parameter = parameter  # DeepSpeed's accessors need the parameter
                shards.append(
                    LocalShard(logical_name(name), partition, region, partial(_cut, length=stop - start))
                )
        return shards


class ZeroThreeLoop(DeepSpeedLoop):
    """DeepSpeed engine with ZeRO stage 3. See `moeverify.train.engine.Engine`."""

    def __init__(self, engine: Any, optimizer: TorchOptimizer) -> None:
        super().__init__(engine, optimizer, stage=3)

    def gradient(self, shard: LocalShard) -> Tensor | None:
        """Return this rank's partition of a gradient."""
        from deepspeed.utils import safe_get_local_grad

        gradient: Tensor | None = safe_get_local_grad(shard.tensor.parameter)  # type: ignore[attr-defined]
        return gradient

    def step(self) -> None:
        """Clip and perform the step of the engine."""
        self._engine.step()

    def state(self, shards: Sequence[LocalShard]) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield this rank's partitions of the moments, and the step counters."""
        from deepspeed.utils import safe_get_local_optimizer_state

        zero = self._engine.optimizer
        for shard in shards:
            parameter = shard.tensor.parameter  # type: ignore[attr-defined]  # set by `list_shards`
            group, _, _ = zero.grad_position[zero.get_param_id(parameter)]
            for key, value in sorted(zero.optimizer.state[zero.fp32_partitioned_groups_flat[group]].items()):
                if isinstance(value, Tensor) and value.ndim == 0:  # step counter of a group
                    yield f"{shard.name}.{key}", value, Region.whole(())
                elif isinstance(value, Tensor):
                    moment = safe_get_local_optimizer_state(parameter, key)
                    yield f"{shard.name}.{key}", shard.local(moment), shard.region


def _cut(partition: Tensor, *, length: int) -> Tensor:
    return partition.reshape(-1)[:length]


# The first release with `safe_get_full_grad` for every stage under torch-style accumulation boundaries.
LEAST = "0.17.0"
STAGES = (0, 1, 2, 3)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[nn.Module], TorchOptimizer],
    stage: int = 0,
    ep_size: int = 1,
    **config: Any,
) -> ParallelizedCustomModel:
    """Return a model under a DeepSpeed engine. `config` holds further fields of its configuration.

    With `ep_size`, the experts of a model of `moeverify.stacks.deepspeed_moe:make` are divided over
    `ep_size` ranks. Collective: all ranks.

    Raises: CaseError when DeepSpeed or this adapter does not support the stage, an axis or the precision.
    """
    deepspeed = import_framework("deepspeed", least=LEAST)
    problems = refuse_axes(mesh, ("tp", "cp"), "this adapter of DeepSpeed divides no model")
    if stage not in STAGES:
        problems.append(
            Problem(f"`{stage}` is no stage", path="layout.arguments.stage", remedy="write 0, 1, 2 or 3")
        )
    has_experts = hasattr(model, "made_of")
    if stage == 3 and has_experts:
        remedy = "write stage 0, 1 or 2"
        message = "DeepSpeed's MoE layers do not go with ZeRO-3"
        problems.append(Problem(message, path="layout.arguments.stage", remedy=remedy))
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        message, remedy = "DeepSpeed's engine refuses float64", "write precision: float32"
        problems.append(Problem(message, path="recipe.precision", remedy=remedy))
    if problems:
        raise CaseError(problems)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if mesh.device_type == "cpu":
        leave_reductions_to_gloo()
    _forget_groups()
    if ep_size > 1:
        model = build_again(model, ep_size)
    optimizer = make_optimizer(model)
    if has_experts:
        split_groups(optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings | config)

    def accumulate(last: bool) -> AbstractContextManager[object]:
        engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    if stage == 3:
        return PartitionedModel(engine, engine=ZeroThreeLoop(engine, optimizer), accumulate=accumulate)
    loop = DeepSpeedLoop(engine, optimizer, stage)
    # `deepspeed_experts.0` is a different expert on each rank.
    return ParallelizedCustomModel(engine, engine=loop, numbers_locally=has_experts, accumulate=accumulate)


def _forget_groups() -> None:
    """Reset DeepSpeed's global process groups, which belong to an earlier case and are destroyed."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    importlib.reload(groups)
    comm.cdb = None

"""ZeRO stage 3: parameters, gradients and moments are in flat partitions, and no whole parameter is kept.

Every rank compares its own partition in place, without a gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from moeverify.parallel.regions.local_shard import LocalShard, logical_name
from moeverify.parallel.regions.region import Region
from moeverify.stacks.deepspeed_loop import DeepSpeedLoop
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

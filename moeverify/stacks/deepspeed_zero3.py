"""ZeRO of stage 3: parameters, gradients and moments lie in flat partitions, and no whole parameter is kept.

Every rank compares its own partition where it lies, so nothing is gathered for a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from moeverify.layout.local_shard import LocalShard, logical_name
from moeverify.layout.region import Region
from moeverify.stacks.deepspeed_loop import DeepSpeedLoop
from moeverify.train.parallelize_custom import ParallelizedCustomModel


class PartitionedModel(ParallelizedCustomModel):
    """A model whose parameters have a partition each in `ds_tensor`; see `ParallelizedCustomModel`."""

    def list_shards(self, whole: Mapping[str, Tensor]) -> list[LocalShard]:
        """Return the partition that this rank has of each parameter; padding at the end belongs to none."""
        shards = []
        for name, parameter in self.model.named_parameters():
            partition: Any = parameter.ds_tensor  # type: ignore[attr-defined]  # ZeRO-3 has set it
            start = dist.get_rank(parameter.ds_process_group) * partition.numel()  # type: ignore[attr-defined]
            stop = min(start + partition.numel(), parameter.ds_numel)  # type: ignore[attr-defined]
            if stop > start:
                region = Region.run(tuple(parameter.ds_shape), start, stop)  # type: ignore[attr-defined]
                partition.parameter = parameter  # DeepSpeed's accessors take the parameter
                shards.append(
                    LocalShard(logical_name(name), partition, region, partial(_cut, length=stop - start))
                )
        return shards


class ZeroThreeLoop(DeepSpeedLoop):
    """An engine of DeepSpeed with ZeRO of stage 3; see `moeverify.train.engine.Engine`."""

    def __init__(self, engine: Any, optimizer: TorchOptimizer) -> None:
        super().__init__(engine, optimizer, stage=3)

    def gradient(self, shard: LocalShard) -> Tensor | None:
        """Return the partition of a gradient that lies here."""
        from deepspeed.utils import safe_get_local_grad

        gradient: Tensor | None = safe_get_local_grad(shard.tensor.parameter)  # type: ignore[attr-defined]
        return gradient

    def step(self) -> None:
        """Clip, and take the engine's step."""
        self._engine.step()

    def state(self, shards: Sequence[LocalShard]) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield the partitions of moments that lie here, and the step counters."""
        from deepspeed.utils import safe_get_local_optimizer_state

        zero = self._engine.optimizer
        for shard in shards:
            parameter = shard.tensor.parameter  # type: ignore[attr-defined]  # `list_shards` has set it
            group, _, _ = zero.grad_position[zero.get_param_id(parameter)]
            for key, value in sorted(zero.optimizer.state[zero.fp32_partitioned_groups_flat[group]].items()):
                if isinstance(value, Tensor) and value.ndim == 0:  # the step counter of a group
                    yield f"{shard.name}.{key}", value, Region.whole(())
                elif isinstance(value, Tensor):
                    moment = safe_get_local_optimizer_state(parameter, key)
                    yield f"{shard.name}.{key}", shard.local(moment), shard.region


def _cut(partition: Tensor, *, length: int) -> Tensor:
    return partition.reshape(-1)[:length]

"""Training loop of one rank that uses a DeepSpeed engine for loss, clip and step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from moeverify.cases.schema import Optimizer
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.train.clipping import clip_coefficient
from moeverify.train.engine import PreparedEngine


class DeepSpeedLoop(PreparedEngine):
    """DeepSpeed engine as the loop of one rank. See `moeverify.train.engine.Engine`.

    Every rank holds whole parameters. ZeRO keeps gradients and moments in flat partitions, from which
    DeepSpeed's accessors return whole tensors.
    """

    def __init__(self, engine: Any, optimizer: TorchOptimizer, stage: int) -> None:
        super().__init__(optimizer)
        self._engine = engine
        self._stage = stage
        self._is_linked = False

    def begin(self, spec: Optimizer, shards: Sequence[LocalShard], kernels: str) -> TorchOptimizer:
        """Set the clip of the recipe in the engine, whose step clips, and return the optimizer."""
        limit = spec.clip_norm or 0.0
        self._engine._config.gradient_clipping = limit
        if self._stage:
            self._engine.optimizer.clip_grad = limit
        return self.optimizer

    def zero_grad(self) -> None:
        """Reset the gradients of the engine."""
        self._engine.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients in the engine, without its scaling: the loss is already scaled."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def gradient(self, shard: LocalShard) -> Tensor | None:
        """Return the whole gradient of a parameter, gathered from its partitions by DeepSpeed."""
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor | None = safe_get_full_grad(shard.tensor)
        return gradient

    def clip(self, shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
        """Return the coefficient, (), by which the step of the engine scales the gradients."""
        return clip_coefficient(norm, max_norm)

    def step(self) -> None:
        """Clip and perform the step of the engine, which then resets the gradients."""
        self._engine.step()
        if self._stage and not self._is_linked:
            # DeepSpeed 0.19.8 (`_optimizer_step`) links the moments of parameters only once, after the step
            # of the first group, when the moments of later groups do not exist yet. Its accessor then finds
            # none.
            zero = self._engine.optimizer
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
            self._is_linked = True

    def state(self, shards: Sequence[LocalShard]) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield the whole moments of each parameter."""
        if not self._stage:
            yield from super().state(shards)
            return
        from deepspeed.utils import safe_get_full_optimizer_state

        zero = self._engine.optimizer
        states = [zero.optimizer.state.get(flat, {}) for flat in zero.single_partition_of_fp32_groups]
        groups = {id(each): number for number, group in enumerate(zero.bit16_groups) for each in group}
        for shard in shards:
            for key, value in sorted(states[groups[id(shard.tensor)]].items()):
                if not isinstance(value, Tensor):
                    continue
                if value.ndim == 0:  # step counter of a group
                    yield f"{shard.name}.{key}", value, Region.whole(())
                else:
                    whole = safe_get_full_optimizer_state(shard.tensor, key)
                    yield f"{shard.name}.{key}", shard.local(whole), shard.region

"""DeepSpeed's engine as the loop of one rank: loss, clip and step go through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from moeverify.case.schema import Optimizer
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.region import Region
from moeverify.train.clipping import clip_coefficient
from moeverify.train.engine import PreparedEngine


class DeepSpeedLoop(PreparedEngine):
    """An engine of DeepSpeed as the loop of one rank; see `moeverify.train.engine.Engine`.

    Parameters are whole on every rank; gradients and moments of ZeRO lie in flat partitions, of which DeepSpeed's own
    accessors make whole tensors.
    """

    def __init__(self, engine: Any, optimizer: TorchOptimizer, stage: int) -> None:
        super().__init__(optimizer)
        self._engine = engine
        self._stage = stage
        self._is_linked = False

    def begin(self, spec: Optimizer, shards: Sequence[LocalShard], kernels: str) -> TorchOptimizer:
        """Give the engine the clip of the recipe, which is a part of its step, and return the optimizer."""
        limit = spec.clip_norm or 0.0
        self._engine._config.gradient_clipping = limit
        if self._stage:
            self._engine.optimizer.clip_grad = limit
        return self.optimizer

    def zero_grad(self) -> None:
        """Let the engine forget the gradients."""
        self._engine.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Accumulate where the engine does, undivided: the loss of a micro-batch is scaled already."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def gradient(self, shard: LocalShard) -> Tensor | None:
        """Return the whole gradient of a parameter, as DeepSpeed gathers it of its partitions."""
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor | None = safe_get_full_grad(shard.tensor)
        return gradient

    def clip(self, shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
        """Return the coefficient by which the engine will scale the gradients in its step, ()."""
        return clip_coefficient(norm, max_norm)

    def step(self) -> None:
        """Clip, and take the engine's step; it forgets the gradients."""
        self._engine.step()
        if self._stage and not self._is_linked:
            # DeepSpeed 0.19.8 (`_optimizer_step`) links the moments of parameters after the step of the first group,
            # when those of later groups are not made yet, and never again: its accessor then finds none.
            zero = self._engine.optimizer
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
            self._is_linked = True

    def state(self, shards: Sequence[LocalShard]) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield the moments of each parameter, whole."""
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
                if value.ndim == 0:  # the step counter of a group
                    yield f"{shard.name}.{key}", value, Region.whole(())
                else:
                    whole = safe_get_full_optimizer_state(shard.tensor, key)
                    yield f"{shard.name}.{key}", shard.local(whole), shard.region

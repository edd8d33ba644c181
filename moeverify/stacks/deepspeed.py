"""DeepSpeed: any model under its engine, with ZeRO of stage 0, 1 or 2 over `dp_replicate` or `dp_shard`.

Loss, micro-batches, clip and step go through the engine. DeepSpeed computes in float32 and below, so a recipe needs
`precision: float32`. A case names `parallelize` and needs no code:

    layout: {dp_shard: 2, parallelize: "moeverify.stacks.deepspeed:parallelize", arguments: {stage: 2}}
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer as TorchOptimizer

from moeverify.case.schema import Optimizer
from moeverify.errors import CaseError, Problem
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.region import Region
from moeverify.stacks.framework import import_framework, refuse_axes
from moeverify.train.clipping import clip_coefficient
from moeverify.train.engine import PreparedEngine
from moeverify.train.parallelize_custom import ParallelizedCustomModel

# The first release with `safe_get_full_grad` for every stage under torch-style accumulation boundaries.
LEAST = "0.17.0"
# Stage 3 keeps no whole parameter between the passes: what a rank stores is no tensor of the module.
STAGES = (0, 1, 2)


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


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[nn.Module], TorchOptimizer],
    stage: int = 0,
    **config: Any,
) -> ParallelizedCustomModel:
    """Return a model as an engine of DeepSpeed has it; `config` are further fields of its configuration.

    Collective: all ranks.

    Raises: CaseError for a stage, an axis or a precision that DeepSpeed or this adapter does not have.
    """
    deepspeed = import_framework("deepspeed", least=LEAST)
    problems = refuse_axes(mesh, ("tp", "cp"), "this adapter of DeepSpeed divides no model")
    if stage not in STAGES:
        remedy = "write 0, 1 or 2; stage 3 keeps no whole parameter that could be compared"
        problems.append(Problem(f"`{stage}` is no stage", path="layout.arguments.stage", remedy=remedy))
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
        # The first all-reduce would compile an operator for shared memory, for minutes; gloo has one.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _forget_groups()
    optimizer = make_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings | config)

    def accumulate(last: bool) -> AbstractContextManager[object]:
        engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    return ParallelizedCustomModel(
        engine, engine=DeepSpeedLoop(engine, optimizer, stage), accumulate=accumulate
    )


def _forget_groups() -> None:
    """Forget the process groups of the case before: DeepSpeed keeps them in globals, and they are gone by then."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    importlib.reload(groups)
    comm.cdb = None

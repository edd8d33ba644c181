"""DeepSpeed: any model under its engine, with ZeRO stage 0 to 3, and its own expert parallelism.

Loss, micro-batches, clip and step use the engine. DeepSpeed does not support float64, so a recipe needs
`precision: float32`. A case names `parallelize` and needs no code:

    layout: {dp_shard: 2, parallelize: "moeverify.stacks.deepspeed:parallelize", arguments: {stage: 2}}
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer as TorchOptimizer

from moeverify.errors import CaseError, Problem
from moeverify.stacks.deepspeed_loop import DeepSpeedLoop
from moeverify.stacks.deepspeed_moe import build_again, leave_reductions_to_gloo, split_groups
from moeverify.stacks.deepspeed_zero3 import PartitionedModel, ZeroThreeLoop
from moeverify.stacks.framework import import_framework, refuse_axes
from moeverify.train.parallelize_custom import ParallelizedCustomModel

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

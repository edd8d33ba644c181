"""Modalities: its GPT under its tensor parallelism and FSDP2. Norm and clip are its own.

A case names functions of this module:

    recipe:
      model:
        factory: moeverify.stacks.modalities:make
        arguments: {vocab_size: 128, n_layer: 2, n_embd: 128, ffn_hidden: 128, n_head_q: 4, n_head_kv: 2, ...}
        vocab_size: 128
    layout:
      dp_shard: 2
      tp: 2
      parallelize: "moeverify.stacks.modalities:parallelize"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from moeverify.errors import CaseError, Problem
from moeverify.stacks.constants import offset_constants
from moeverify.stacks.framework import import_framework, refuse_axes, refuse_model
from moeverify.stacks.loop import FrameworkLoop
from moeverify.train.parallelize_custom import ParallelizedCustomModel

# The first release whose models keep their layers by name, as its parallelism expects.
LEAST = "0.5.0"


def make(*, spread: float = 0.1, **fields: Any) -> nn.Module:
    """Return a GPT of Modalities. `fields` are those of GPT2LLMConfig.

    Constant tensors get random offsets of scale `spread`.

    Raises: CaseError when Modalities refuses the fields.
    """
    import_framework("modalities", least=LEAST, path="recipe.model.factory")
    from modalities.models.gpt2.gpt2_model import GPT2LLMConfig
    from modalities.models.model_factory import GPT2ModelFactory

    try:
        config = GPT2LLMConfig(**{"sample_key": "tokens", "prediction_key": "logits"} | fields)
    except ValueError as error:
        message = f"Modalities refuses the model: {error}"
        raise CaseError([Problem(message, path="recipe.model.arguments")]) from error
    model: nn.Module = GPT2ModelFactory.get_gpt2_model(**dict(config))
    offset_constants(model.parameters(), spread)
    return model


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[nn.Module], Optimizer],
    block_names: Sequence[str] = ("GPT2Block",),
    reshard_after_forward: bool = True,
    layers_per_fsdp_unit: int = 1,
) -> ParallelizedCustomModel:
    """Return a GPT divided by Modalities' model factory: tensor parallelism, then FSDP2 or HSDP.

    The arguments are those of its component `fsdp2_wrapped`. Collective: all ranks.

    Raises: CaseError when Modalities does not support the layout, or did not make the model.
    """
    import_framework("modalities", least=LEAST)
    from modalities.models.gpt2.gpt2_model import GPT2LLM
    from modalities.models.model_factory import GPT2ModelFactory, ModelFactory
    from modalities.training.gradient_clipping.fsdp_gradient_clipper import (
        FSDP2GradientClipper,
        GradientClippingMode,
    )

    problems = refuse_axes(mesh, ("cp",), "Modalities does not divide a sequence")
    if not isinstance(model, GPT2LLM):
        problems.append(refuse_model(f"{type(model).__name__} is no GPT2LLM of Modalities", __name__))
    if problems:
        raise CaseError(problems)
    dtype = SimpleNamespace(value=next(model.parameters()).dtype)  # its enumeration has no float64
    own_mesh = _build_mesh(mesh)
    try:
        if mesh["tp"].size() > 1:
            model = GPT2ModelFactory.get_gpt2_tensor_parallelized_model(model, own_mesh)
    except (ValueError, NotImplementedError) as error:
        raise CaseError([Problem(f"Modalities refuses the layout: {error}", path="layout.tp")]) from error
    divided: Any = ModelFactory.get_fsdp2_wrapped_model(
        model,
        list(block_names),
        own_mesh,
        SimpleNamespace(param_dtype=dtype, reduce_dtype=dtype),
        reshard_after_forward,
        layers_per_fsdp_unit,
    )

    def clip_by_norm(limit: float) -> Any:
        return FSDP2GradientClipper(divided, limit, GradientClippingMode.P2_NORM, own_mesh).clip_gradients()

    optimizer = make_optimizer(divided)
    engine = FrameworkLoop(optimizer, optimizer, torch.autograd.backward, clip_by_norm)
    return ParallelizedCustomModel(divided.train(), engine=engine, accumulate=_reduce_each_time)


def _build_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return Modalities' mesh, without axes of one rank."""
    from modalities.running_env.fsdp.device_mesh import get_device_mesh

    built: DeviceMesh = get_device_mesh(
        device_type=mesh.device_type,
        data_parallel_replicate_degree=mesh["dp_replicate"].size(),
        data_parallel_shard_degree=mesh["dp_shard"].size(),
        tensor_parallel_degree=mesh["tp"].size(),
        pipeline_parallel_degree=1,
        context_parallel_degree=1,
        enable_loss_parallel=False,
        world_size=mesh.size(),
    )
    return built


def _reduce_each_time(last: bool) -> AbstractContextManager[object]:
    """Return an empty context: its trainer reduces the gradients of every micro-batch."""
    return nullcontext()

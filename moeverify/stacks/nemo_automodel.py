"""NeMo Automodel: its own models and those of transformers under its parallelizer, over dp, tp and ep.

Gradients are scaled and clipped as in its training recipe. A case names functions of this module:

    recipe:
      model:
        factory: moeverify.stacks.nemo_automodel:make
        arguments: {model_type: qwen3_moe, vocab_size: 96, hidden_size: 32, num_experts: 8}
        loss: moeverify.stacks.nemo_automodel:loss
        vocab_size: 96
    layout:
      dp_shard: 2
      parallelize: "moeverify.stacks.nemo_automodel:parallelize"
      arguments: {ep_size: 2}
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from moeverify.errors import CaseError, Problem
from moeverify.stacks.constants import offset_constants
from moeverify.stacks.framework import import_framework, refuse_axes, refuse_unknown_arguments
from moeverify.stacks.loop import FrameworkLoop
from moeverify.stacks.megatron_on_cpu import CudaIsCpu
from moeverify.train.data import IGNORED
from moeverify.train.parallelize_custom import ParallelizedCustomModel

# The first release that divides a model by a MeshContext.
LEAST = "0.7.0"
_DISTRIBUTION = "nemo-automodel"
_EXPERTS = "ep"  # an axis of its mesh


def make(
    model_type: str, *, backend: Mapping[str, Any] | None = None, spread: float = 0.1, **fields: Any
) -> nn.Module:
    """Return a causal language model of NeMo Automodel, or that of transformers where it has none of its own.

    `fields` are fields of the configuration that transformers has for `model_type`, and `backend` those of
    BackendConfig. Constant tensors get random offsets of scale `spread`.

    Raises: CaseError when transformers has no such family.
    """
    import_framework("nemo_automodel", least=LEAST, path="recipe.model.factory", distribution=_DISTRIBUTION)
    from nemo_automodel._transformers.registry import get_registry
    from nemo_automodel.components.models.common import BackendConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers: Any = importlib.import_module("transformers")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if architecture is None:
        message = f"transformers has no causal language models of the family `{model_type}`"
        remedy = "write one such as qwen3_moe, deepseek_v3 or llama"
        raise CaseError([Problem(message, path="recipe.model.arguments.model_type", remedy=remedy)])
    config = transformers.AutoConfig.for_model(model_type, **fields, dtype="float32")
    own = get_registry().resolve_custom_model_cls(architecture, config)
    if own is None:
        built = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    else:
        with CudaIsCpu(), patch.object(torch.cuda, "current_device", lambda: 0):  # its RoPE asks for a GPU
            built = own.from_config(config, backend=BackendConfig(**backend or {}))
            if not isinstance(built, transformers.PreTrainedModel):  # which has its initial weights already
                built.initialize_weights(torch.device("cpu"), torch.float32)
    model: nn.Module = built
    offset_constants(model.parameters(), spread)
    return model


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return NeMo Automodel's cross entropy summed over the valid tokens, ()."""
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy

    with torch.compiler.set_stance("force_eager"):  # its activations of experts are compiled functions
        output = model(tokens)
    logits = getattr(output, "logits", output)
    is_narrow = logits.dtype.itemsize < torch.float32.itemsize
    total: Tensor = MaskedCrossEntropy(fp32_upcast=is_narrow, ignore_index=IGNORED)(logits, targets)
    return total


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[nn.Module], Optimizer],
    ep_size: int = 1,
    **arguments: Any,
) -> ParallelizedCustomModel:
    """Return a model divided by NeMo Automodel: FSDP2, HSDP or DDP, tensor and expert parallelism.

    `arguments` are fields of its FSDP2Config. Collective: all ranks.

    Raises: CaseError when NeMo Automodel does not support the layout, or an argument is unknown.
    """
    import_framework("nemo_automodel", least=LEAST, distribution=_DISTRIBUTION)
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.model_parallelizer import parallelize_model
    from nemo_automodel.components.distributed.utils import get_sync_ctx
    from nemo_automodel.components.training import utils

    problems = refuse_axes(mesh, ("cp",), "this adapter of NeMo Automodel divides no sequences")
    problems += refuse_unknown_arguments(FSDP2Config, arguments)
    if problems:
        raise CaseError(problems)
    dtype = next(model.parameters()).dtype
    try:
        context = _build_context(mesh, ep_size, dtype, arguments)
        divided = parallelize_model(model, context)
    except (ValueError, NotImplementedError) as error:
        raise CaseError([Problem(f"NeMo Automodel refuses the layout: {error}", path="layout")]) from error
    parts = [divided]

    def accumulate(last: bool) -> AbstractContextManager[object]:
        utils.prepare_for_grad_accumulation(parts)
        if last:
            utils.prepare_for_final_backward(parts)
        deferred = getattr(context.strategy_config, "defer_fsdp_grad_sync", True)
        entered: AbstractContextManager[object] = get_sync_ctx(divided, last, deferred)
        return entered

    clip_by_norm = partial(
        utils.clip_grad_norm, model_parts=parts, moe_mesh=context.moe_mesh, ep_axis_name=_EXPERTS
    )
    optimizer = make_optimizer(divided)
    engine = FrameworkLoop(optimizer, optimizer, torch.autograd.backward, clip_by_norm)
    finalize = partial(_scale, parts, context)
    return ParallelizedCustomModel(divided.train(), engine=engine, accumulate=accumulate, finalize=finalize)


def _build_context(mesh: DeviceMesh, ep_size: int, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Any:
    """Return NeMo Automodel's meshes and policies: DDP if `dp_replicate` is the only axis, else FSDP2."""
    from nemo_automodel.components.distributed.config import DDPConfig, FSDP2Config
    from nemo_automodel.components.distributed.mesh import MeshContext, ParallelismSizes

    sizes = {axis: mesh[axis].size() for axis in ("dp_replicate", "dp_shard", "tp")}
    if sizes["dp_replicate"] == mesh.size() > 1:
        if arguments:
            raise ValueError("dp_replicate alone is DDP, which has no fields of FSDP2Config")
        return MeshContext.build(DDPConfig(), ParallelismSizes(ep_size=ep_size))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    wanted = ParallelismSizes(
        dp_size=sizes["dp_replicate"] * sizes["dp_shard"],
        dp_replicate_size=sizes["dp_replicate"],
        tp_size=sizes["tp"],
        ep_size=ep_size,
    )
    return MeshContext.build(FSDP2Config(**{"mp_policy": policy} | dict(arguments)), wanted)


def _scale(parts: list[nn.Module], context: Any) -> None:
    """Reduce the gradients that tensor parallelism replicates and scale those of experts. Collective: all ranks."""
    from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
    from nemo_automodel.components.training import utils

    synchronize_tp_replica_gradients(parts, context.device_mesh)
    utils.scale_grads_and_clip_grad_norm(
        None,
        parts,
        device_mesh=context.device_mesh,
        moe_mesh=context.moe_mesh,
        ep_axis_name=_EXPERTS,
        dp_group_size=context.dp_size,
        expert_tp_replication_factor=utils.get_expert_tp_replication_factor(parts, context.device_mesh),
    )

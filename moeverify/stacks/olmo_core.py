"""OLMo-core: its transformers under the data, tensor, expert and context parallelism of its train module.

`TransformerTrainModule` divides the model. Norm, clip and micro-batches are also its own. It initializes a
divided model again, so each rank then copies its part of the whole model's weights. A case names functions
of this module:

    recipe:
      model:
        factory: moeverify.stacks.olmo_core:make
        arguments: {preset: llama_like, d_model: 32, vocab_size: 96, n_layers: 2, n_heads: 4}
        loss: moeverify.stacks.olmo_core:loss
        vocab_size: 96
    layout:
      dp_shard: 2
      parallelize: "moeverify.stacks.olmo_core:parallelize"
      arguments: {ep_degree: 2}
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moeverify.errors import CaseError, Problem
from moeverify.parallel.regions.local_shard import parameters
from moeverify.stacks.constants import offset_constants
from moeverify.stacks.framework import import_framework, refuse_model, refuse_unknown_arguments
from moeverify.stacks.kept_precision import KeptPrecision
from moeverify.stacks.loop import FrameworkLoop
from moeverify.stacks.olmo_core_on_cpu import replace_kernels
from moeverify.train.data import IGNORED
from moeverify.train.parallelize_custom import ParallelizedCustomModel

# The first release whose models accept parts of sequences that the caller has divided.
LEAST = "3.0.0"
_DISTRIBUTION = "ai2-olmo-core"


def make(preset: str, *, spread: float = 0.1, **arguments: Any) -> nn.Module:
    """Return a transformer with the initial weights of OLMo-core.

    `preset` names a method of TransformerConfig, such as `llama_like`, `llama_like_moe` or `olmo3_1M`, and
    `arguments` are its arguments. Constant tensors get random offsets of scale `spread`.

    Raises: CaseError when TransformerConfig has no such preset.
    """
    import_framework("olmo_core", least=LEAST, path="recipe.model.factory", distribution=_DISTRIBUTION)
    from olmo_core.nn.transformer import TransformerConfig

    build = getattr(TransformerConfig, preset, None)
    if build is None:
        message = f"TransformerConfig of olmo_core has no preset `{preset}`"
        remedy = "write one such as llama_like, llama_like_moe or olmo3_1M"
        raise CaseError([Problem(message, path="recipe.model.arguments.preset", remedy=remedy)])
    replace_kernels()
    model: nn.Module = build(**arguments).build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"))  # type: ignore[operator]  # defined by OLMo-core
    offset_constants(model.parameters(), spread)
    return model


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return OLMo-core's cross entropy summed over the valid tokens, ().

    Under context parallelism the rank has a contiguous part of each sequence.
    """
    inside: Any = getattr(model, "module", model)  # inside of DDP's wrapper
    parts: dict[str, Any] = {}
    if inside._cp_load_balancer is not None:
        length = tokens.shape[1] * inside._cp_load_balancer.cp_world_size
        parts = {"cp_already_sharded": True, "cp_original_seq_len": length}
    with KeptPrecision():
        output = model(
            tokens, labels=targets, ignore_index=IGNORED, loss_reduction="sum", return_logits=False, **parts
        )
    total: Tensor = output.loss
    return total.full_tensor() if isinstance(total, DTensor) else total


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[nn.Module], Optimizer],
    ep_degree: int = 1,
    **arguments: Any,
) -> ParallelizedCustomModel:
    """Return a transformer divided by OLMo-core's train module: FSDP2, HSDP or DDP, tp, ep and Ulysses.

    Experts are divided over `dp_shard`. `arguments` are further fields of TransformerDataParallelConfig,
    such as `wrapping_strategy`. Collective: all ranks.

    Raises: CaseError when the model is not from OLMo-core, it refuses the layout, or an argument is unknown.
    """
    import_framework("olmo_core", least=LEAST, distribution=_DISTRIBUTION)
    from olmo_core.distributed import parallel
    from olmo_core.exceptions import OLMoConfigurationError
    from olmo_core.nn.transformer import Transformer
    from olmo_core.train.train_module import TransformerTrainModule
    from olmo_core.train.train_module.transformer import config

    problems = refuse_unknown_arguments(config.TransformerDataParallelConfig, arguments)
    if not isinstance(model, Transformer):
        problems.append(refuse_model(f"{type(model).__name__} is no transformer of OLMo-core", __name__))
    if problems:
        raise CaseError(problems)
    values = {shard.name: shard.local().clone() for shard in parameters(model)}
    first, tp, cp = next(model.parameters()), mesh["tp"].size(), mesh["cp"].size()
    parallel._WORLD_MESH = None  # once per process, and the process of a launch has several cases
    try:
        trainer = TransformerTrainModule(
            model,
            # Its constructor builds the optimizer.
            optim=SimpleNamespace(build=lambda divided, strict: make_optimizer(divided)),
            # Sizes of the caches that it fills in advance; these grow when a sequence is longer.
            rank_microbatch_size=1,
            max_sequence_length=1,
            dp_config=_configure_data_parallelism(mesh, ep_degree, first.dtype, arguments),
            tp_config=config.TransformerTensorParallelConfig(degree=tp) if tp > 1 else None,
            cp_config=config.TransformerContextParallelConfig.ulysses(cp) if cp > 1 else None,
            ep_config=config.TransformerExpertParallelConfig(degree=ep_degree) if ep_degree > 1 else None,
            device=first.device,
        )
    except (OLMoConfigurationError, NotImplementedError) as error:
        raise CaseError([Problem(f"OLMo-core refuses the layout: {error}", path="layout")]) from error
    with torch.no_grad():
        for shard in parameters(trainer.model):
            shard.local().copy_(shard.region.take(values[shard.name]))

    def accumulate(last: bool) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = trainer._train_microbatch_context(int(last), 2)
        return context

    engine = FrameworkLoop(trainer.optim, trainer.optim, torch.autograd.backward, trainer._clip_grad_norm)
    return ParallelizedCustomModel(trainer.model.train(), engine=engine, accumulate=accumulate)


def _configure_data_parallelism(
    mesh: DeviceMesh, ep_degree: int, dtype: torch.dtype, arguments: dict[str, Any]
) -> Any:
    """Return the data parallelism of a mesh, in the precision of the weights unless `arguments` name another."""
    from olmo_core.train.train_module.transformer.config import TransformerDataParallelConfig

    replicas, shards = mesh["dp_replicate"].size(), mesh["dp_shard"].size()
    fields: dict[str, Any] = {"name": "ddp" if replicas > 1 else "fsdp"}
    if ep_degree > 1 or (replicas > 1 and shards > 1):
        fields = {"name": "hsdp", "num_replicas": replicas, "shard_degree": shards}
    config = TransformerDataParallelConfig.from_dict(fields | arguments)
    for field in ("param_dtype", "reduce_dtype"):
        if field not in arguments:
            # OLMo-core's DType has no float64.
            setattr(config, field, SimpleNamespace(as_pt=lambda: dtype))
    return config

"""Hugging Face transformers: its causal language models under its own tensor, expert and data parallelism.

transformers divides a model while loading it. The whole model is therefore saved to a folder that all ranks
can read, and each rank loads its part. This also verifies saving, name conversion and loading. A case names
`make` and `parallelize` of this module and needs no code:

    recipe:
      model:
        factory: moeverify.stacks.transformers:make
        arguments: {model_type: qwen3_moe, hidden_size: 32, ...}
        vocab_size: 96
    layout: {tp: 2, parallelize: "moeverify.stacks.transformers:parallelize", arguments: {ep_size: 2}}
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moeverify.errors import CaseError, Problem
from moeverify.stacks.constants import offset_constants
from moeverify.stacks.framework import import_framework, refuse_axes, refuse_unknown_arguments

# The oldest release that was tested. `dp_replicate_size` and `ep_size` were added later.
LEAST = "5.17.0"
# Names of the axes of `parallelize` in transformers, which has no context parallelism.
_SIZES = {"dp_replicate": "dp_replicate_size", "dp_shard": "fsdp_size", "tp": "tp_size"}

_MOST_CHANGED = 0.1  # of a buffer's norm: more than any dtype rounds, less than uninitialized memory
_MOST_NAMED = 3


def make(model_type: str, *, experts: str = "eager", spread: float = 0.1, **config: Any) -> nn.Module:
    """Return a causal language model of a family, with random weights and its attention in plain torch.

    `config` holds the arguments of the family's configuration. `experts` is the experts implementation in
    transformers; `grouped_mm` supports only float32 and bfloat16. Constant tensors, such as norm weights
    and biases, get random offsets of scale `spread`; see `offset_constants`.

    Raises: CaseError when transformers has no such family.
    """
    transformers = import_framework("transformers", least=LEAST, path="recipe.model.factory")
    known = transformers.CONFIG_MAPPING
    if model_type not in known:
        message = f"transformers {transformers.__version__} has no family `{model_type}`"
        remedy = "write a `model_type` of its configurations, such as qwen3_moe, mixtral or llama"
        raise CaseError([Problem(message, path="recipe.model.arguments.model_type", remedy=remedy)])
    built = known[model_type](**config)
    built._experts_implementation = experts
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(built, attn_implementation="eager")
    built.use_cache = False
    offset_constants(model.parameters(), spread)
    return model


def parallelize(model: nn.Module, mesh: DeviceMesh, **arguments: Any) -> nn.Module:
    """Return a model of transformers, loaded for the sizes of a mesh.

    `arguments` are further fields of transformers' DistributedConfig, such as `ep_size` and
    `ep_implementation`. They override the sizes of the mesh. Collective: all ranks.

    Raises: CaseError when the model is not from transformers, when an argument or axis is not supported, or when
    loading leaves a buffer uninitialized.
    """
    transformers = import_framework("transformers", least=LEAST)
    from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]  # exported lazily

    if not isinstance(model, transformers.PreTrainedModel):
        message = f"{type(model).__name__} is no model of transformers"
        remedy = "make it by `recipe.model.factory: moeverify.stacks.transformers:make`, or by from_config"
        raise CaseError([Problem(message, path="layout.parallelize", remedy=remedy)])
    sizes = {field: mesh[axis].size() for axis, field in _SIZES.items()}
    # Omit axes of one rank: transformers treats a size of 1 as a request.
    wanted = {name: size for name, size in sizes.items() if size > 1} | arguments
    problems = refuse_unknown_arguments(DistributedConfig, wanted)
    problems += refuse_axes(mesh, ("cp",), "transformers does not divide a model")
    if problems:
        raise CaseError(problems)
    with _saved(model) as folder:
        loaded: nn.Module = type(model).from_pretrained(
            folder,
            distributed_config=DistributedConfig(**wanted),
            dtype=next(model.parameters()).dtype,
            experts_implementation=model.config._experts_implementation,
            attn_implementation="eager",
        )
    _align_buffers(model, loaded)
    _refuse_uninitialized(model, loaded)
    return loaded.train()


def find_uninitialized(whole: nn.Module, loaded: nn.Module) -> list[str]:
    """Return the names of buffers of a loaded model that are far from those of the whole model, or not finite.

    transformers allocates buffers that are not saved by `torch.empty_like`. Its own models then compute them
    in `_init_weights`. In a model that does not, they are uninitialized memory.
    """
    computed = dict(whole.named_buffers())
    found = []
    for name, buffer in loaded.named_buffers():
        value = computed.get(name)
        if value is None or value.shape != buffer.shape or not value.is_floating_point():
            continue
        distance = (buffer.double() - value.double()).norm()
        if not distance <= _MOST_CHANGED * value.double().norm():
            found.append(name)
    return found


def _refuse_uninitialized(whole: nn.Module, loaded: nn.Module) -> None:
    """Raise on all ranks if loading left a buffer uninitialized on any rank. Collective: all ranks."""
    by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    # The memory of one rank may have the right values by chance.
    dist.all_gather_object(by_rank, find_uninitialized(whole, loaded))
    names = list(dict.fromkeys(name for found in by_rank for name in found))
    if names:
        listed = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        message = f"`from_pretrained` of {type(whole).__name__} leaves buffers uninitialized: {listed}{more}"
        remedy = "they are not saved: compute them in `_init_weights`, as the models of transformers do"
        raise CaseError([Problem(message, path="layout.parallelize", remedy=remedy)])


@torch.no_grad()
def _align_buffers(whole: nn.Module, loaded: nn.Module) -> None:
    """Copy the bits of unsaved buffers from the whole model if both are equal in float32.

    transformers recomputes scales and frequencies in the dtype that it loads, whereas the whole model is
    created in float32 and then widened. The square root of a hidden size then differs by 2e-8, which would
    not happen in a training run.
    """
    computed = dict(whole.named_buffers())
    for name, buffer in loaded.named_buffers():
        value = computed.get(name)
        if value is not None and value.is_floating_point() and torch.equal(value.float(), buffer.float()):
            buffer.copy_(value)


@contextmanager
def _saved(model: nn.Module) -> Iterator[str]:
    """Save a model on rank 0 while all ranks load it. Collective: all ranks.

    On several nodes, the folder for temporary files (TMPDIR) must be shared.
    """
    folder = [tempfile.mkdtemp(prefix="moeverify-transformers-") if dist.get_rank() == 0 else ""]
    try:
        if dist.get_rank() == 0:
            model.save_pretrained(folder[0])  # type: ignore[operator]  # defined by transformers' base class
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)

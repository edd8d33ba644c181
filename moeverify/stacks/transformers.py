"""Hugging Face transformers: its causal language models under its own tensor, expert and data parallelism.

transformers divides a model while it loads it. So the whole model is saved to a folder that all ranks can read, and
each rank loads its part from there; saving, the conversion of names and loading are verified with it. A case names
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

# The first release that was tried. Sizes for `dp_replicate` and `ep_size` came later.
LEAST = "5.17.0"
# What transformers calls the axes of `parallelize`; it has none for context parallelism.
_SIZES = {"dp_replicate": "dp_replicate_size", "dp_shard": "fsdp_size", "tp": "tp_size"}


def make(model_type: str, *, experts: str = "eager", spread: float = 0.1, **config: Any) -> nn.Module:
    """Return a causal language model of a family, with random weights and its attention in plain torch.

    `config` are the arguments of the family's configuration. `experts` is transformers' implementation of the
    experts; `grouped_mm` computes in float32 and bfloat16 only. Norms of ones and biases of zero get random offsets
    of the size `spread`, since constants hide what is swapped or missing.
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
    """Return a model of transformers as it loads it for the sizes of a mesh.

    `arguments` are further fields of transformers' DistributedConfig, such as `ep_size` and `ep_implementation`; one
    that the mesh has already given replaces it. Collective: all ranks.

    Raises: CaseError for a model that is none of transformers, and for an argument that it does not have.
    """
    transformers = import_framework("transformers", least=LEAST)
    from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]  # it is exported lazily

    if not isinstance(model, transformers.PreTrainedModel):
        message = f"{type(model).__name__} is no model of transformers"
        remedy = "make it by `recipe.model.factory: moeverify.stacks.transformers:make`, or by from_config"
        raise CaseError([Problem(message, path="layout.parallelize", remedy=remedy)])
    sizes = {field: mesh[axis].size() for axis, field in _SIZES.items()}
    # An axis of one rank is not named: transformers takes a size of 1 for a wish.
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
    return loaded.train()


@torch.no_grad()
def _align_buffers(whole: nn.Module, loaded: nn.Module) -> None:
    """Give buffers that are not saved the bits of the whole model where float32 cannot tell the two apart.

    transformers computes scales and frequencies again, in the dtype that it loads; the whole model was made in
    float32 and widened. The square root of a hidden size then differs by 2e-8, as it would in no training run.
    """
    computed = dict(whole.named_buffers())
    for name, buffer in loaded.named_buffers():
        value = computed.get(name)
        if value is not None and value.is_floating_point() and torch.equal(value.float(), buffer.float()):
            buffer.copy_(value)


@contextmanager
def _saved(model: nn.Module) -> Iterator[str]:
    """Save a model on the first rank, for the time that all ranks load it. Collective: all ranks.

    On several nodes the folder for temporary files (TMPDIR) must be one that they share.
    """
    folder = [tempfile.mkdtemp(prefix="moeverify-transformers-") if dist.get_rank() == 0 else ""]
    try:
        if dist.get_rank() == 0:
            model.save_pretrained(folder[0])  # type: ignore[operator]  # of transformers' base class
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)

"""The logical parameters and buffers of a model that has been parallelized, and what this rank holds of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from moeverify.layout.placement import local_part, region_of
from moeverify.layout.region import Region

_WRAPPERS = re.compile(
    r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|_pipeline_stage_\d+|module)(?=\.|$)"
)


def logical_name(name: str) -> str:
    """Return the name that a parameter has in the unwrapped model.

    DDP, FSDP1, activation checkpointing, compilation and our pipelines each insert a component into the FQN.
    """
    return _WRAPPERS.sub("", name).lstrip(".")


@dataclass(frozen=True)
class Holding:
    """A logical tensor of the model and the region of it that this rank stores in `tensor`.

    Gradients and optimizer moments of a parameter are held in the same region.
    """

    name: str
    tensor: Tensor
    region: Region

    def local(self, tensor: Tensor | None = None) -> Tensor:
        """Return the locally stored values, of `tensor` (a gradient, a moment) or of the tensor itself."""
        return local_part(self.tensor if tensor is None else tensor).detach()


def parameters(model: nn.Module) -> list[Holding]:
    """Return every parameter of which this rank stores something, in the model's order, tied ones once."""
    flat = dict(_flat_shards(model))
    held: list[Holding] = []
    for name, parameter in model.named_parameters():
        region = flat.get(id(parameter)) or region_of(parameter)
        if region.numel or not flat:
            held.append(Holding(logical_name(name), parameter, region))
    return held


def buffers(model: nn.Module) -> list[Holding]:
    """Return every persistent buffer of the model, in the model's order; a complex one as pairs of numbers."""
    held: list[Holding] = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                held.append(Holding(logical_name(f"{prefix}.{name}"), values, region_of(values)))
    return held


def _flat_shards(model: nn.Module) -> Iterator[tuple[int, Region]]:
    """Yield (id of the parameter, region) for parameters that FSDP1 keeps as runs of a flat parameter."""
    for module in model.modules():
        if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
            continue
        flat = module._handle.flat_param
        parameters = flat._params
        if parameters is None:
            raise TypeError("FSDP1 is verified with use_orig_params=True only")
        for parameter, shape, shard in zip(parameters, flat._shapes, flat._shard_param_infos, strict=True):
            first, last = shard.intra_param_start_idx, shard.intra_param_end_idx
            held = range(0) if first is None or last is None else range(first, last + 1)
            yield id(parameter), Region.run(shape, held.start, held.stop)

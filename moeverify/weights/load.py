"""Weights of any format into a model under any layout: each rank reads what it holds and little else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moeverify.errors import FormatError, join_problems
from moeverify.layout.local_shard import LocalShard, buffers, parameters
from moeverify.weights.description import Description
from moeverify.weights.source import Source, Spec, read_region
from moeverify.weights.stream import open_source


@dataclass(frozen=True)
class Loaded:
    """What one rank has loaded: tensors of which it holds something, and bytes taken from the files."""

    num_tensors: int
    num_bytes_read: int


def load_weights(
    target: nn.Module | Sequence[LocalShard],
    folder: Path | str,
    *,
    described: Description | None = None,
    drop: Sequence[str] = (),
    rounded_to: torch.dtype | None = None,
) -> Loaded:
    """Fill what this rank holds of a reference model with the weights of a folder, and return what was read.

    `target` is the model, as it is under its layout, or a list of what to fill. Values are rounded to the dtype
    of the model where that is narrower, or first to `rounded_to`. A name, a shape or a dtype that does not fit is
    found before anything is changed.
    Not collective: every rank reads for itself.

    Raises: FormatError that names the file and the key.
    """
    shards = [*parameters(target), *buffers(target)] if isinstance(target, nn.Module) else target
    return fill_shards(shards, open_source(Path(folder), described, drop), Path(folder), rounded_to)


@torch.no_grad()
def fill_shards(
    shards: Sequence[LocalShard], source: Source, folder: Path, rounded_to: torch.dtype | None
) -> Loaded:
    """Fill shards with what a folder has under their names, rounded to `rounded_to` first, and return what was read.

    Raises: FormatError that names the folder and every tensor that does not fit.
    """
    problems = [f"{folder}: {text}" for shard in shards if (text := _find_misfit(source.specs, shard))]
    if problems:
        raise FormatError(join_problems(problems))
    for shard in shards:
        local = shard.local()
        values = read_region(source, shard.name, shard.region).view(local.shape)
        local.copy_(values if rounded_to is None else values.to(rounded_to))
    return Loaded(len(shards), source.num_bytes_read)


def _find_misfit(specs: Mapping[str, Spec], shard: LocalShard) -> str:
    """Return why a stored tensor cannot fill a shard; nothing where it can."""
    spec = specs.get(shard.name)
    if spec is None:
        return f"{shard.name} is not there"
    if spec.shape != shard.region.shape:
        return f"{shard.name} has shape {spec.shape}, and the model {shard.region.shape}"
    if not spec.dtype.is_floating_point:
        return (
            f"{shard.name} has dtype {str(spec.dtype).removeprefix('torch.')}, which needs scales to be read"
        )
    return ""

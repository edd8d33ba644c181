"""Loading of weights in any format under any layout: each rank reads little more than its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moeverify.errors import FormatError, join_problems
from moeverify.parallel.regions.local_shard import LocalShard, buffers, parameters
from moeverify.tools.weights.description import Description
from moeverify.tools.weights.source import Spec, WeightSource, read_region
from moeverify.tools.weights.stream import open_source


@dataclass(frozen=True)
class LoadedWeights:
    """Result of loading on one rank: the number of tensors it stores part of, and bytes read from files."""

    num_tensors: int
    num_bytes_read: int


def load_weights(
    target: nn.Module | Sequence[LocalShard],
    folder: Path | str,
    *,
    described: Description | None = None,
    drop: Sequence[str] = (),
    rounded_to: torch.dtype | None = None,
) -> LoadedWeights:
    """Fill this rank's shards of a reference model with the weights of a folder.

    `target` is the model under its layout, or a list of shards. Values are rounded to the dtype of the
    model, after rounding to `rounded_to` if given. Mismatches of names, shapes and dtypes are found before
    any tensor changes. Returns the number of tensors and bytes read. Not collective: every rank reads
    independently. Example: `load_weights(model, "Mixtral-8x7B").num_tensors`.

    Raises: FormatError with the file and the key.
    """
    shards = [*parameters(target), *buffers(target)] if isinstance(target, nn.Module) else target
    return fill_shards(shards, open_source(Path(folder), described, drop), Path(folder), rounded_to)


@torch.no_grad()
def fill_shards(
    shards: Sequence[LocalShard], source: WeightSource, folder: Path, rounded_to: torch.dtype | None
) -> LoadedWeights:
    """Fill shards with the stored tensors of their names, rounded to `rounded_to` first if given.

    Returns the number of tensors and bytes read.

    Raises: FormatError with the folder and every tensor that does not fit.
    """
    problems = [f"{folder}: {text}" for shard in shards if (text := _find_misfit(source.specs, shard))]
    if problems:
        raise FormatError(join_problems(problems))
    for shard in shards:
        local = shard.local()
        values = read_region(source, shard.name, shard.region).view(local.shape)
        local.copy_(values if rounded_to is None else values.to(rounded_to))
    return LoadedWeights(len(shards), source.num_bytes_read)


def _find_misfit(specs: Mapping[str, Spec], shard: LocalShard) -> str:
    """Return why a stored tensor cannot fill a shard, or an empty string if it can."""
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

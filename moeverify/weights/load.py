"""Weights of any format into a model under any layout: each rank reads what it holds and little else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moeverify.errors import FormatError
from moeverify.layout.local_shard import LocalShard, buffers, parameters
from moeverify.weights.description import Description
from moeverify.weights.source import read_region
from moeverify.weights.stream import open_source


@dataclass(frozen=True)
class Loaded:
    """What one rank has loaded: tensors of which it holds something, and bytes taken from the files."""

    num_tensors: int
    num_bytes_read: int


@torch.no_grad()
def load_weights(
    target: nn.Module | Sequence[LocalShard],
    folder: Path | str,
    *,
    described: Description | None = None,
    drop: Sequence[str] = (),
) -> Loaded:
    """Fill what this rank holds of a reference model with the weights of a folder, and return what was read.

    `target` is the model, as it is under its layout, or a list of what to fill. Values are rounded to the dtype
    of the model where that is narrower. A name or shape that does not fit is found before anything is changed.
    Not collective: every rank reads for itself.

    Raises: FormatError that names the file and the key.
    """
    shards = [*parameters(target), *buffers(target)] if isinstance(target, nn.Module) else target
    source = open_source(Path(folder), described, drop)
    for shard in shards:
        if shard.name not in source.specs:
            raise FormatError(f"{folder}: {shard.name} is not there")
        if source.specs[shard.name].shape != shard.region.shape:
            stored = source.specs[shard.name].shape
            raise FormatError(
                f"{folder}: {shard.name} has shape {stored}, and the model {shard.region.shape}"
            )
    for shard in shards:
        local = shard.local()
        local.copy_(read_region(source, shard.name, shard.region).view(local.shape))
    return Loaded(len(shards), source.num_bytes_read)

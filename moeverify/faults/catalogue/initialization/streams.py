"""Helper of this class: a shard filled with one run of its parameter's random stream."""

from __future__ import annotations

import torch

from moeverify.cases.schema import ReferenceModel
from moeverify.model.init import initial_values
from moeverify.parallel.regions.local_shard import LocalShard


def fill_run(spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype, start: int = 0) -> None:
    """Fill a shard of n elements with elements `start` to `start + n` of the whole tensor's stream.

    The right code takes each element from its position in the whole tensor.
    """
    local = shard.local()
    index = torch.arange(start, start + local.numel(), device=local.device)
    values = initial_values(spec, seed, shard.name, shard.region.shape, index)
    local.copy_(values.to(dtype).to(local.dtype).reshape(local.shape))

"""What faults of this class share: a shard that is filled with one run of its parameter's random stream."""

from __future__ import annotations

import torch

from moeverify.case.schema import ReferenceModel
from moeverify.layout.local_shard import LocalShard
from moeverify.model.init import initial_values


def fill_run(spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype, start: int = 0) -> None:
    """Fill a shard of n elements with elements `start` to `start + n` of the whole tensor's stream.

    Right is to take each element from where it stands in the whole tensor.
    """
    local = shard.local()
    index = torch.arange(start, start + local.numel(), device=local.device)
    values = initial_values(spec, seed, shard.name, shard.region.shape, index)
    local.copy_(values.to(dtype).to(local.dtype).reshape(local.shape))

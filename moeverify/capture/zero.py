"""Where the parameters of a model lie in the flat partitions that DeepSpeed's ZeRO gives to the optimizer.

Stages 1 and 2 concatenate the parameters of a group, and each rank steps one part of that in float32. DeepSpeed
leaves at each parameter which elements of it are in the part of this rank:
https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/tensor_fragment.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from moeverify.layout.local_shard import LocalShard
from moeverify.layout.region import Region


def find_fragments(partition: Tensor, shards: Sequence[LocalShard]) -> Iterator[LocalShard]:
    """Yield the part of each parameter that lies in a flat partition; none where it is no partition of ZeRO.

    Shapes: `partition` is (elements of all parameters of a group / ranks), padded at its end.
    """
    storage = partition.untyped_storage().data_ptr()
    for shard in shards:
        mapping = getattr(shard.tensor, "_hp_mapping", None)
        if mapping is None or mapping.hp_fragment is None:
            continue
        if mapping.hp_fragment.untyped_storage().data_ptr() != storage:
            continue
        own, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        region = Region.run(shard.region.shape, own.start, own.start + own.numel)
        view = partial(_narrow, start=flat.start, length=flat.numel)
        yield LocalShard(shard.name, partition, region, view)


def _narrow(tensor: Tensor, *, start: int, length: int) -> Tensor:
    return tensor.reshape(-1).narrow(0, start, length)

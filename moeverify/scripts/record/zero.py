"""Location of a model's parameters in the flat partitions that DeepSpeed ZeRO gives to the optimizer.

ZeRO stages 1 and 2 concatenate the parameters of a group, and each rank updates one part in float32.
DeepSpeed stores at each parameter which elements are in this rank's part:
https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/tensor_fragment.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region


def find_fragments(partition: Tensor, shards: Sequence[LocalShard]) -> Iterator[LocalShard]:
    """Yield the part of each parameter in a flat partition; nothing if it is not a ZeRO partition.

    Shapes: `partition` is (elements of all parameters of a group / ranks,), padded at its end.
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

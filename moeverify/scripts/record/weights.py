"""Initial weights from another run, or moved by a unit of rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moeverify.errors import FormatError
from moeverify.hashing import hash_counter, key_of
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.scripts.record.read import RecordedRun


@torch.no_grad()
def load_weights(shards: Sequence[LocalShard], folder: Path, rank: int, world_size: int) -> None:
    """Load the initial weights of a recorded run into a model's shards, by logical name and region.

    A plain tensor that is smaller than the recorded one along one dim is taken as one of equal parts, in
    rank order.

    Raises: FormatError with every parameter without a recorded value. The model is then unchanged.
    """
    run = RecordedRun.read(folder)
    found: list[tuple[LocalShard, torch.Tensor]] = []
    problems: list[str] = []
    for shard in shards:
        whole = run.read_whole(Kind.INITIAL_WEIGHT, shard.name)
        region = None if whole is None else _place(shard, tuple(whole.shape), rank, world_size)
        if whole is None or region is None:
            has = "no such parameter" if whole is None else f"the shape {tuple(whole.shape)}"
            problems.append(f"{shard.name} {shard.region.shape}: {folder} has {has}")
        else:
            found.append((shard, region.take(whole)))
    if problems:
        raise FormatError(f"weights were not loaded: {'; '.join(problems)}")
    for shard, values in found:
        local = shard.local()
        local.copy_(values.reshape(local.shape))


@torch.no_grad()
def nudge_weights(shards: Sequence[LocalShard], seed: int, dtype: torch.dtype | None = None) -> None:
    """Move every weight by one unit of rounding, up or down by a hash of its global index.

    The unit is relative: the distance from 1.0 to the next larger number in the weight's dtype. If the
    script computes in a narrower `dtype`, it is the largest error of one rounding to that dtype, half of
    such a distance. A weight is rounded by up to that much each time it is used.
    """
    for shard in shards:
        local = shard.local()
        if not local.is_floating_point() or not shard.region.numel:
            continue
        places = shard.region.flat_index(local.device).reshape(local.shape)
        signs = 1 - 2 * (hash_counter(key_of("nudge", seed, shard.name), places) & 1)
        unit = torch.finfo(local.dtype).eps
        if dtype is not None:
            unit = max(unit, torch.finfo(dtype).eps / 2)
        local.mul_(1 + signs.to(local.dtype) * unit)


def _place(shard: LocalShard, shape: tuple[int, ...], rank: int, world_size: int) -> Region | None:
    """Return the region of a recorded tensor that a shard holds, or None if it is unknown."""
    own = shard.region.shape
    if own == shape:
        return shard.region
    unequal = [dim for dim, sizes in enumerate(zip(own, shape, strict=False)) if sizes[0] != sizes[1]]
    if len(own) != len(shape) or len(unequal) != 1 or not shard.region.is_whole:
        return None
    (dim,) = unequal
    if own[dim] * world_size != shape[dim]:
        return None
    dims = [range(size) for size in shape]
    dims[dim] = range(rank * own[dim], (rank + 1) * own[dim])
    return Region.box(shape, dims)

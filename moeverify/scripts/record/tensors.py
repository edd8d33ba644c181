"""Lines for a rank's tensors: their region in the logical tensor, and their values or a sketch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.placement import is_partial
from moeverify.parallel.regions.region import Region
from moeverify.scripts.record.lines import ShardRegion, Span, Values
from moeverify.scripts.record.rank_file import RankFile
from moeverify.scripts.record.sketch import sketch
from moeverify.verification.compare.difference import fingerprint_bits


def keep_tensor(
    file: RankFile,
    limit: int,
    step: int,
    kind: str,
    shard: LocalShard,
    tensor: Tensor | None,
    *,
    before: float | None = None,
    own: int = 0,
    site: str = "",
) -> None:
    """Write this rank's part of a logical tensor: a parameter, its gradient, or a local change.

    A part larger than `limit` bytes is stored as a sketch; None is recorded as absent. For `before`, `own`
    and `site` see `Values`.
    """
    is_placed = isinstance(shard.tensor, DTensor) or shard.region.flat is not None
    where = describe_region(shard.region)
    common = {"step": step, "kind": kind, "name": shard.name, "where": where, "is_placed": is_placed}
    if tensor is None:
        file.add(Values.model_validate({**common, "is_absent": True}))
        return
    local = shard.local(tensor)
    values = local.to(torch.float64) if local.dtype.itemsize < 4 or not local.is_floating_point() else local
    is_small = local.numel() * local.element_size() <= limit
    line = Values.model_validate(
        {
            **common,
            "is_partial": is_partial(tensor),
            "dtype": str(local.dtype).removeprefix("torch."),
            "offset": file.keep(local) if is_small else None,
            "squares": float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2,
            "bits": int(fingerprint_bits(local)),
            "sketch": () if is_small else sketch(local, shard.region),
            "before": before,
            "own": own,
            "site": site,
        }
    )
    file.add(line)


def hash_random(local: Tensor) -> int:
    """Return the hash of a tensor's bits, or 0 if all its elements are equal."""
    flat = local.detach().reshape(-1)
    return int(fingerprint_bits(local)) if flat.numel() and bool((flat != flat[0]).any()) else 0


def describe_region(region: Region) -> ShardRegion:
    """Convert a region to a record."""
    if region.flat is not None:
        return ShardRegion(shape=region.shape, flat=Span(start=region.flat.start, stop=region.flat.stop))
    dims = (
        Span(start=indices.start, stop=indices.stop) if isinstance(indices, range) else indices
        for indices in region.dims
    )
    return ShardRegion(shape=region.shape, dims=tuple(dims))


def make_region(where: ShardRegion) -> Region:
    """Convert a record from `describe_region` to a region."""
    if where.flat is not None:
        return Region.run(where.shape, where.flat.start, where.flat.stop)
    dims = [range(dim.start, dim.stop) if isinstance(dim, Span) else dim for dim in where.dims]
    return Region.box(where.shape, dims)

"""Nested shards are assembled in the wrong order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Treat strided shards as plain ones when weights are saved."""
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.parallel.regions.placement import shard_region
    from moeverify.parallel.regions.region import Region
    from moeverify.tools.checkpoint import save
    from moeverify.tools.checkpoint.writer import Part

    def misread(shard: LocalShard) -> Region:
        tensor = shard.tensor
        if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
            return shard.region
        placements = [
            Shard(placement.dim) if isinstance(placement, _StridedShard) else placement
            for placement in tensor.placements
        ]
        mesh = tensor.device_mesh
        return shard_region(tuple(tensor.shape), tuple(mesh.shape), mesh.get_coordinate() or (), placements)

    @patch.wrap(save.list_parts, used_by=save)
    def list_misread(
        original: Original[tuple[list[Part], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[Part], dict[str, Tensor]]:
        return original([replace(shard, region=misread(shard)) for shard in tensors])


FAULT = Fault(
    number="O09",
    title="rows are permuted where FSDP2 shards what TP has sharded",
    source="pytorch/pytorch issue #129206, PR #130760; pytorch/torchtitan PR #1483",
    mechanism="the order of nested shards is not in the placement: the outer axis is taken to cut first",
    trigger="FSDP2 over tensor parallelism, on one dim",
    saver=make_saved_case("o09", dp_shard=2, tp=2),
    case=make_saved_case("o09"),
    expected=Expected(where=(At(name="weight/*"),), causes=(Cause.PERMUTATION,)),
    inject=inject,
    is_moe=False,
)

"""Run by every rank: regions of real DTensors against torch's own placement of values on each rank."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from moeverify.parallel.regions.local_shard import logical_name, parameters
from moeverify.parallel.regions.placement import local_part, region_of, shard_region
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext

SHAPES = ((8, 6), (7, 5), (3, 2), (1, 4))


def compare(name: str, whole: Tensor, tensor: Tensor) -> list[str]:
    """Return the errors in the region of a tensor whose logical values are known."""
    region, local = region_of(tensor), local_part(tensor).detach()
    if tuple(local.shape) != region.local_shape:
        return [f"{name}: shape {tuple(local.shape)}, region {region.local_shape}"]
    return [] if torch.equal(region.take(whole), local) else [f"{name}: other elements than {region.key}"]


def check_distributed(mesh: DeviceMesh) -> list[str]:
    """Check tensors that torch shards, for every placement on both axes, even and uneven."""
    wrong = []
    for shape in SHAPES:
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
        for pair in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
            wrong += compare(f"{shape} {pair}", whole, distribute_tensor(whole, mesh, pair))
    return wrong


def check_packed(line: DeviceMesh) -> list[str]:
    """Check packed rows, where every rank has a part of each block: torch assembles them again."""
    wrong = []
    whole = torch.arange(24.0 * 24, dtype=torch.float64).reshape(24, 24)
    for dim, factor in itertools.product((0, 1), (1, 2, 3)):
        placements = [_StridedShard(dim, split_factor=factor)]
        rank = (line.get_local_rank(),)
        region = shard_region((24, 24), (line.size(),), rank, placements)
        packed = DTensor.from_local(region.take(whole), line, placements)
        if not torch.equal(packed.full_tensor(), whole):
            wrong.append(f"{placements}: {region.key} is not what torch means")
    return wrong


def build_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 6, bias=False), nn.LayerNorm(6))
    return model.to(torch.float64)


def check_model(model: nn.Module, plain: nn.Module) -> list[str]:
    """Check the stored shards of a wrapped model, and that all ranks together store every parameter."""
    wanted = dict(plain.named_parameters())
    wrong = []
    held = {holding.name: holding for holding in parameters(model)}
    for name, whole in wanted.items():
        seen = torch.zeros_like(whole)
        if name in held:
            region, local = held[name].region, held[name].local()
            if not torch.equal(region.take(whole.detach()).reshape(-1), local.reshape(-1)):
                wrong.append(f"{name}: other elements than {region.key}")
            region.put(seen, torch.ones(region.local_shape, dtype=seen.dtype))
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        if not bool(seen.all()):
            wrong.append(f"{name}: nobody holds some of it")
    strangers = set(held) - set(wanted)
    return wrong + [f"{name}: no such parameter" for name in strangers]


def choose_dim(parameter: nn.Parameter) -> Shard:
    """Return the last dim where FSDP2 allows it: it refuses uneven shards of any but the first dim."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else Shard(0)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Return on rank 0 the errors of all ranks, by check."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    wrong = {"distributed": check_distributed(mesh), "packed": check_packed(line)}
    for width in (8, 5):
        plain = build_model(width)
        wrong[f"tp {width}"] = check_model(parallelize(build_model(width), mesh["tp"]), plain)
        both = parallelize(build_model(width), mesh["tp"])
        wrong[f"fsdp2 + tp {width}"] = check_model(fully_shard(both, mesh=mesh["dp"]), plain)
        strided = [p.placements for p in both.parameters() if "_StridedShard" in repr(p.placements)]
        if not strided:
            wrong["strided"] = ["FSDP2 over tensor parallelism has made no strided shard"]
        hybrid = fully_shard(build_model(width), mesh=mesh)
        wrong[f"hsdp {width}"] = check_model(hybrid, plain)
        columns = fully_shard(build_model(width), mesh=line, shard_placement_fn=choose_dim)
        wrong[f"fsdp2 on the last dim {width}"] = check_model(columns, plain)
        flat = FullyShardedDataParallel(
            build_model(width),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            use_orig_params=True,
        )
        wrong[f"fsdp1 {width}"] = check_model(flat, plain)
        strangers = [name for name, _ in flat.named_parameters() if "_fsdp" in logical_name(name)]
        wrong[f"fsdp1 {width}"] += strangers
    everything: list[Any] = [None] * context.world_size
    dist.all_gather_object(everything, wrong)
    if context.rank != 0:
        return None
    return {
        title: [
            f"rank {rank}: {line}" for rank, found in enumerate(everything) for line in found.get(title, [])
        ]
        for title in wrong
    }


if __name__ == "__main__":
    serve(sys.argv[1], run_job)

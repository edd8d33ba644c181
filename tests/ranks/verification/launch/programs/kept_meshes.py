"""An entry whose jobs build equal meshes and admit them, over groups of equal or different names."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext

_find_sharding = ShardingPropagator.propagate_op_sharding_non_cached
found_anew: list[str] = []


def find_sharding(self: ShardingPropagator, schema: Any) -> Any:
    found_anew.append(str(schema.op))
    return _find_sharding(self, schema)


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    asked = job.payload
    for _ in range(asked.get("num_groups_before", 0)):
        dist.new_group([0, 1])
    mesh = init_device_mesh(context.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    context.admit([mesh])
    part = mesh["shard"]
    if asked.get("adds_mesh", False):
        part = init_device_mesh(context.device.type, (4,), mesh_dim_names=("all",))
    found_anew.clear()
    ShardingPropagator.propagate_op_sharding_non_cached = find_sharding  # type: ignore[method-assign]
    try:
        sharded = DTensor.from_local(torch.full((2,), 1.0 + context.rank), part, [Shard(0)]).requires_grad_()
        norm = torch.linalg.vector_norm(sharded)
        norm.full_tensor().backward()
    finally:
        ShardingPropagator.propagate_op_sharding_non_cached = _find_sharding  # type: ignore[method-assign]
    return {
        "squared": round(norm.full_tensor().item() ** 2, 3),
        "found anew": bool(found_anew),
        "groups of old meshes": sum(
            len(getattr(found, "_pg_registry", ()))
            for found in gc.get_objects()
            if type(found) is DeviceMesh and found._get_root_mesh() not in (mesh, part)
        ),
    }


if __name__ == "__main__":
    serve(sys.argv[1], run_job)

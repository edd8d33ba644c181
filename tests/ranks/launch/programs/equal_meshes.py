"""An entry, imported before the ranks are forked, whose jobs build equal meshes over groups of other names."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from moeverify.launch.plan import Job
from moeverify.launch.rank import serve
from moeverify.launch.runner import RankContext


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    old = sum(type(found) is DeviceMesh for found in gc.get_objects())
    for _ in range(job.payload["num_groups_before"]):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mesh._flatten("all")  # torch sums over both axes at once where it can, in the group of the flattened mesh
    sharded = DTensor.from_local(torch.full((2,), 1.0 + context.rank), mesh, [Shard(0), Shard(0)])
    norm = torch.linalg.vector_norm(sharded)
    return {"norm": norm.full_tensor().item(), "old_meshes": old}


if __name__ == "__main__":
    serve(sys.argv[1], run_job)

"""An entry, imported before the ranks are forked, whose jobs build equal meshes over other group names."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    old = sum(type(found) is DeviceMesh for found in gc.get_objects())
    for _ in range(job.payload["num_groups_before"]):
        dist.new_group([0, 1])
    mesh = init_device_mesh(context.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    mesh._flatten("all")  # torch sums over both axes at once if it can, in the group of the flattened mesh
    mine = torch.full((2,), 1.0 + context.rank, device=context.device)
    sharded = DTensor.from_local(mine, mesh, [Shard(0), Shard(0)]).requires_grad_()
    norm = torch.linalg.vector_norm(sharded)
    norm.full_tensor().backward()  # a GPU's in a thread of autograd's, with its own caches
    gradient = sharded.grad
    assert isinstance(gradient, DTensor)
    return {
        "norm": norm.full_tensor().item(),
        "norm of the gradient": torch.linalg.vector_norm(gradient * gradient).full_tensor().item(),
        "old_meshes": old,
        "mesh of the gradient": "new" if gradient.device_mesh is mesh else "old",
    }


if __name__ == "__main__":
    serve(sys.argv[1], run_job)

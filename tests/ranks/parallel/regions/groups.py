"""Run by every rank: the process groups behind the meshes of layouts, and their errors."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from moeverify.cases.axes.registry import EXPERT_AXES
from moeverify.cases.schema import Layout
from moeverify.parallel.meshes import Meshes, build_meshes
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import RankContext, serve


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Return on rank 0 the errors of all ranks, and the largest number of groups that a rank has made."""
    before = len(dist.distributed_c10d._world.pg_names)
    meshes = build_meshes(Layout.model_validate(job.payload["layout"]), "cpu")
    made = len(dist.distributed_c10d._world.pg_names) - before
    found: list[Any] = [None] * context.world_size
    dist.all_gather_object(found, (_find_wrong(meshes, context.rank), made))
    wrong = [text for texts, _ in found for text in texts]
    return {"wrong": wrong, "made": max(number for _, number in found)} if context.rank == 0 else None


def _find_wrong(meshes: Meshes, rank: int) -> list[str]:
    wrong = []
    plan = meshes.plan
    views = (
        (plan.data, meshes.data),
        (plan.dense, meshes.dense),
        (plan.sparse, meshes.sparse),
        (plan.loss, meshes.loss),
    )
    apart: dict[str, Any] = {}
    for view, mesh in views:
        for axis in view.axes:
            ranks = next(group for group in view.groups(axis) if rank in group)
            group = mesh.get_group(axis)
            if dist.get_process_group_ranks(group) != ranks:
                wrong.append(f"rank {rank}: {axis} has {dist.get_process_group_ranks(group)}, not {ranks}")
            if mesh.get_local_rank(axis) != view.coordinates(rank)[axis]:
                wrong.append(f"rank {rank}: is not at {view.coordinates(rank)[axis]} of {axis}")
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            if total.item() != sum(ranks):
                wrong.append(f"rank {rank}: the sum over {axis} is {total.item()}, not {sum(ranks)}")
            if len(ranks) in (1, dist.get_world_size()):
                continue
            role = axis if axis in EXPERT_AXES else "dense"
            if apart.setdefault(group.group_name, role) != role:
                wrong.append(f"rank {rank}: {axis} shares its group with {apart[group.group_name]}")
    return wrong


if __name__ == "__main__":
    serve(sys.argv[1], run_job)

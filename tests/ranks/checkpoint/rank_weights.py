"""Run by every rank: weights of a folder into a model under a layout, against what the whole tensors have there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeverify.case.schema import Layout, Recipe
from moeverify.checkpoint.weights import load_weights
from moeverify.errors import FormatError
from moeverify.launch.plan import Job
from moeverify.launch.rank import serve
from moeverify.launch.runner import RankContext
from moeverify.layout.holding import buffers, parameters
from moeverify.parallel.meshes import build_meshes
from moeverify.train.assemble import assemble_parallel


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Return on rank 0 what is wrong on any rank, and bytes read and held by each rank."""
    recipe = Recipe.model_validate_json(job.payload["recipe"])
    layout = Layout.model_validate_json(job.payload["layout"])
    meshes = build_meshes(layout, "cpu")
    program = assemble_parallel(recipe, layout, meshes, context.device)
    whole = torch.load(Path(job.payload["whole"]), weights_only=True)
    loaded = load_weights(program.model, job.payload["folder"])
    wrong = []
    num_held = 0
    holdings = [*parameters(program.model), *buffers(program.model)]
    for held in holdings:
        local = held.local()
        num_held += local.nbytes
        expected = held.region.take(whole[held.name]).to(local.dtype)
        if not torch.equal(expected.reshape(-1), local.reshape(-1)):
            wrong.append(f"rank {context.rank}: {held.name} {held.region.key}")
    try:
        load_weights(program.model, job.payload["other"])
        wrong.append(f"rank {context.rank}: the weights of another model were taken")
    except FormatError as error:
        if "has shape" not in str(error):
            wrong.append(f"rank {context.rank}: {error}")
    everything: list[Any] = [None] * context.world_size
    dist.all_gather_object(everything, (wrong, loaded.num_bytes_read, num_held))
    if context.rank != 0:
        return None
    total = sum(tensor.nbytes for tensor in whole.values())
    return {
        "wrong": [line for found, _, _ in everything for line in found],
        "read": [read for _, read, _ in everything],
        "held": [held for _, _, held in everything],
        "total": total,
    }


if __name__ == "__main__":
    serve(sys.argv[1], run_job)

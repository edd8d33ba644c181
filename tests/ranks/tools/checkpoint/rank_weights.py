"""Run by every rank: load a folder's weights into a model under a layout, and compare with whole tensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from moeverify.cases.schema import Layout, Recipe
from moeverify.errors import FormatError
from moeverify.parallel.meshes import build_meshes
from moeverify.parallel.regions.local_shard import buffers, parameters
from moeverify.tools.weights import safetensors_files
from moeverify.tools.weights.load import load_weights
from moeverify.train.assemble import assemble_parallel
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext


class Recorder:
    """A wrapper of the safetensors library that counts the bytes requested from it."""

    num_bytes = 0

    def __init__(self, path: Path, **options: Any) -> None:
        self.file = safe_open(path, **options)

    def get_slice(self, key: str) -> RecordedSlice:
        return RecordedSlice(self.file.get_slice(key))


class RecordedSlice:
    def __init__(self, part: Any) -> None:
        self.part = part

    def __getitem__(self, index: Any) -> torch.Tensor:
        values: torch.Tensor = self.part[index]
        Recorder.num_bytes += values.nbytes
        return values


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Return on rank 0 the problems of all ranks, and the bytes that each rank read and held."""
    recipe = Recipe.model_validate_json(job.payload["recipe"])
    layout = Layout.model_validate_json(job.payload["layout"])
    meshes = build_meshes(layout, "cpu")
    program = assemble_parallel(recipe, layout, meshes, context.device)
    whole = torch.load(Path(job.payload["whole"]), weights_only=True)
    Recorder.num_bytes = 0
    safetensors_files.safe_open = Recorder
    try:
        loaded = load_weights(program.model, job.payload["folder"])
    finally:
        safetensors_files.safe_open = safe_open
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
    dist.all_gather_object(everything, (wrong, loaded.num_bytes_read, num_held, Recorder.num_bytes))
    if context.rank != 0:
        return None
    total = sum(tensor.nbytes for tensor in whole.values())
    return {
        "wrong": [line for found, *_ in everything for line in found],
        "read": [read for _, read, *_ in everything],
        "held": [held for _, _, held, _ in everything],
        "asked": [asked for *_, asked in everything],
        "total": total,
    }


if __name__ == "__main__":
    serve(sys.argv[1], run_job)

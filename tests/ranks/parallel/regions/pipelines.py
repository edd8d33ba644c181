"""Run by every rank: a step of two pipeline stages together against the same step on one device."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.cases.schema import Layout, Recipe
from moeverify.faults.setting import make_case
from moeverify.parallel.meshes import build_meshes
from moeverify.parallel.regions.region import Region
from moeverify.tools.bench.measure import take_step
from moeverify.train.assemble import assemble_parallel, assemble_single
from moeverify.train.loop import make_batches, train
from moeverify.train.program import TrainingProgram
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext

CPU = torch.device("cpu")
# Sizes of stages for two layers, one and two stages per rank.
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved_1f1b": {"stage_layers": (0, 1, 1, 0)},
    "interleaved_zero_bubble": {"stage_layers": (0, 1, 1, 0)},
    "zbv": {"stage_layers": (0, 1, 1, 0)},
}


class Record:
    """An observer that keeps every piece, by (step, kind, name)."""

    def __init__(self) -> None:
        self.pieces: dict[tuple[int, str, str], list[tuple[Region, Tensor | None]]] = {}

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        kept = None if local is None else local.detach().clone()
        self.pieces.setdefault((step, kind, name), []).append((region, kept))

    def begin_step(self, step: int) -> None:
        pass

    def assembled(self, key: tuple[int, str, str]) -> Tensor:
        """Return the logical tensor assembled from the pieces of all micro-batches."""
        parts = self.pieces[key]
        whole = torch.full(parts[0][0].shape, torch.nan, dtype=torch.float64)
        for region, local in parts:
            assert local is not None, key
            region.put(whole, local.to(torch.float64))
        return whole


def make_recipe(name: str) -> Recipe:
    """Return a recipe of two steps with auxiliary losses, rows of unequal length and a clip that binds."""
    preset = "stress-tied" if name == "tied" else "stress"
    model = {} if name == "tied" else {"num_layers": 2, "num_dense_layers": 0}
    return make_case("pipelines", preset=preset, model=model, optimizer="adamw").recipe


def run(recipe: Recipe, program: TrainingProgram) -> Record:
    record = Record()
    train(recipe, program, record)
    return record


def compare(expected: Record, actual: Record) -> list[str]:
    """Return the values of this rank that differ from those of one device."""
    wrong = []
    for key in actual.pieces:
        want, got = expected.assembled(key), actual.assembled(key)
        if not torch.allclose(want, got, rtol=1e-10, atol=1e-12, equal_nan=True):
            wrong.append(f"{key}: off by {float((want - got).abs().max()):.3g}")
    return wrong


def check(layout: Layout, recipe: Recipe, expected: Record, rank: int) -> dict[str, Any]:
    """Return the errors of this rank, and the tensors that it has shown."""
    program = assemble_parallel(recipe, layout, build_meshes(layout, "cpu"), CPU)
    actual = run(recipe, program)
    embed = [held.local() for held in program.shards if held.name == "embed.weight"]
    return {
        "wrong": compare(expected, actual),
        "shown": sorted({f"{kind}/{name}" for _, kind, name in actual.pieces}),
        "embed": [held.tolist() for held in embed],
        "layers": sorted({held.name.split(".")[1] for held in program.shards if "layers." in held.name}),
    }


def take_one_step(layout: Layout, recipe: Recipe, expected: Record) -> list[str]:
    """Return the weights of this rank that are wrong after an unobserved step."""
    program = assemble_parallel(recipe, layout, build_meshes(layout, "cpu"), CPU)
    program.engine.begin(recipe.optimizer, program.shards, "foreach")
    take_step(recipe, program, make_batches(recipe, program, 0))
    actual = Record()
    for held in program.shards:
        actual.observe(0, "weight", held.name, held.local(), held.region)
    return compare(expected, actual)


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Return on rank 0 the findings of every rank for each schedule and recipe."""
    found: dict[str, Any] = {}
    for name in ("untied", "tied"):
        recipe = make_recipe(name)
        expected = run(recipe, assemble_single(recipe, CPU))
        for schedule, options in SCHEDULES.items():
            layout = Layout(pp=2, micro_batches=4, pipeline_schedule=schedule, **options)  # type: ignore[arg-type]
            found[f"{name} {schedule}"] = check(layout, recipe, expected, context.rank)
            found[f"{name} {schedule}"]["wrong unwatched"] = take_one_step(layout, recipe, expected)
        found[f"{name} alone"] = {"shown": sorted({f"{kind}/{key}" for _, kind, key in expected.pieces})}
    everything: list[Any] = [None] * context.world_size
    dist.all_gather_object(everything, found)
    return {title: [part[title] for part in everything] for title in found} if context.rank == 0 else None


if __name__ == "__main__":
    serve(sys.argv[1], run_job)

"""What one device reads at its modules, and the operators of a step, of one device and of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from moeverify.case.schema import Recipe
from moeverify.diagnose.capture import Capture
from moeverify.diagnose.first_divergence import Search
from moeverify.diagnose.graph.found import Graphs
from moeverify.diagnose.graph.record import Graph, GraphMode
from moeverify.golden.store import StoredGolden
from moeverify.layout.local_shard import logical_name
from moeverify.layout.placement import local_part
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.module_taps import Reading, Tap
from moeverify.train.program import Program, dtype_of
from moeverify.worker.step_tap import StepTap


def read_golden_modules(
    recipe: Recipe, golden: StoredGolden, step: int, device: torch.device
) -> list[Reading]:
    """Return what one device reads at its modules in the step, started from the golden's state. No collective."""
    return _read(recipe, golden, step, device, records=False)[0]


def record_golden_modules(
    recipe: Recipe, golden: StoredGolden, step: int, device: torch.device
) -> tuple[list[Reading], Graph | None]:
    """Return what `read_golden_modules` does, and the operators of the step where these are recorded."""
    return _read(recipe, golden, step, device, records=True)


def _read(
    recipe: Recipe, golden: StoredGolden, step: int, device: torch.device, *, records: bool
) -> tuple[list[Reading], Graph | None]:
    program = assemble_single(recipe, device, compute="float64")
    mode = make_graph_mode(recipe, program, lambda: tap.inside is not None) if records else None
    batch = recipe.data
    tap = Tap(
        program.model, batch.batch, batch.seq_len, scale=1.0, limit=1 << 62, reads_loose=True, notes=mode
    )
    observer = StepTap(Capture(()), tap, step)
    with mode or nullcontext():
        train(recipe, program, observer, golden=golden, num_steps=step + 1)
    observer.close()
    return tap.readings, None if mode is None else mode.graph


def make_graph_mode(recipe: Recipe, program: Program, is_open: Callable[[], bool]) -> GraphMode | None:
    """Return what records the operators of the step; None in narrow dtypes, whose rounding hides what is equal."""
    if dtype_of(recipe.precision) is not torch.float64:
        return None
    named = (*program.model.named_parameters(), *program.model.named_buffers())
    names = {local_part(each.detach()).data_ptr(): logical_name(name) for name, each in named}
    return GraphMode(names, program.scale, is_open)


def make_graphs(
    golden: Graph | None, by_rank: Sequence[Graph | None], search: Search | None
) -> Graphs | None:
    """Return the operators of one device and of all ranks, where all have been recorded."""
    recorded = [each for each in by_rank if each is not None and each.nodes]
    if golden is None or not golden.nodes or search is None or len(recorded) < len(by_rank):
        return None
    return Graphs(golden, recorded, search.bound)

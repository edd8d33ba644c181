"""On every rank: train a case for some steps without its golden, and measure what it costs."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from moeverify.bench.profile import read_traffic
from moeverify.bench.roofline import measure_roofline, synchronize
from moeverify.case.flops import count_training_flops
from moeverify.case.schema import Case
from moeverify.layout.local_shard import buffers, parameters
from moeverify.parallel.meshes import build_meshes
from moeverify.results.measurement import Floors, Spread, Traffic
from moeverify.train.assemble import assemble_parallel
from moeverify.train.data import Batch
from moeverify.train.loop import make_batches
from moeverify.train.program import Program
from moeverify.train.step import take_step


def measure_case(
    case: Case, device: torch.device, folder: Path, *, warmup: int, steps: int
) -> dict[str, Any] | None:
    """Return on rank 0 the fields of a `Measurement`; None on the other ranks.

    Collective: all ranks of the default process group, which has as many ranks as the layout.
    """
    floors = measure_roofline(case, device)
    _forget(device)
    program = assemble_parallel(
        case.recipe, case.layout, build_meshes(case.layout, device.type), device, fill=fill_roughly
    )
    stepper = _Stepper(case, program)
    for _ in range(warmup):
        stepper.step()
    with PeakMemory(device) as memory:
        seconds = _time_steps(stepper, device, steps)
    traffic = _profile(stepper, device, folder)
    stored = float(sum(held.local().nbytes for held in program.shards))
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (seconds, memory.peak, stored, floors.model_dump(), traffic))
    return _merge(case, rows) if dist.get_rank() == 0 else None


@torch.no_grad()
def fill_roughly(model: nn.Module) -> None:
    """Fill what this rank holds with numbers of the right size: speed does not depend on which they are."""
    for held in [*parameters(model), *buffers(model)]:
        local = held.local()
        if held.name.endswith("norm.weight"):
            local.fill_(1.0)
        elif local.is_floating_point():
            local.normal_(0.0, 0.02)


class _Stepper:
    """Takes one training step after the other, over batches that are made beforehand."""

    NUM_BATCHES = 4

    def __init__(self, case: Case, program: Program) -> None:
        self._case = case
        self._program = program
        program.engine.begin(case.recipe.optimizer, program.shards, program.optimizer_implementation)
        self._batches: Sequence[Sequence[Batch]] = [
            make_batches(case.recipe, program, step) for step in range(self.NUM_BATCHES)
        ]
        self._number = 0

    def step(self) -> None:
        batches = self._batches[self._number % self.NUM_BATCHES]
        self._number += 1
        take_step(self._case.recipe, self._program, batches)


def _time_steps(stepper: _Stepper, device: torch.device, steps: int) -> list[float]:
    """Return the seconds of each step; on a GPU by events, so that nothing waits between two steps."""
    dist.barrier()
    synchronize(device)
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(steps):
            stepper.step()
            times.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(times)]
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(steps + 1)
    ]
    events[0].record()
    for event in events[1:]:
        stepper.step()
        event.record()
    synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def _profile(stepper: _Stepper, device: torch.device, folder: Path) -> tuple[list[Any], float, float | None]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    dist.barrier()
    with profile(activities=activities, record_shapes=True) as seen:
        stepper.step()
        synchronize(device)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trace-{dist.get_rank()}.json"
    seen.export_chrome_trace(str(path))
    traffic, together, exposed = read_traffic(path)
    return [found.model_dump() for found in traffic], together, exposed


def _merge(case: Case, rows: Sequence[Any]) -> dict[str, Any]:
    """Return the fields of the measurement: of each number that of the slowest rank, of traffic rank 0's."""
    seconds, peaks, stored, floors, traffic = zip(*rows, strict=True)
    step = Spread.of([max(of_step) for of_step in zip(*seconds, strict=True)])
    recipe, num_ranks = case.recipe, len(rows)
    tokens = recipe.data.batch * recipe.data.seq_len
    flops = None
    if recipe.model.reference is not None:
        total = tokens * count_training_flops(recipe.model.reference, recipe.data.seq_len)
        flops = total / step.median / num_ranks
    exposed = [found[2] for found in traffic if found[2] is not None]
    return {
        "step": step.model_dump(),
        "tokens_per_second": tokens / step.median,
        "flops": flops,
        "peak_memory": max(peaks),
        "parameters": max(stored),
        "communication": max(found[1] for found in traffic),
        "exposed": max(exposed) if exposed else None,
        "traffic": [Traffic.model_validate(found).model_dump() for found in traffic[0][0]],
        "floors": _slowest(floors).model_dump(),
    }


def _slowest(rows: Sequence[dict[str, Any]]) -> Floors:
    found = [Floors.model_validate(row) for row in rows]
    experts = [floor.experts for floor in found if floor.experts is not None]
    return Floors(
        matmul=min(floor.matmul for floor in found),
        experts=min(experts) if experts else None,
        collectives={kind: min(floor.collectives[kind] for floor in found) for kind in found[0].collectives},
    )


class PeakMemory:
    """A context in which the peak of this rank's memory is seen: allocated on the GPU, or anonymous. Units: bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = 0.0

    def __enter__(self) -> PeakMemory:
        """Begin to watch."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return self
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Note the peak."""
        if self._device.type == "cuda":
            self.peak = float(torch.cuda.max_memory_allocated(self._device))
            return
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text().splitlines()
            now = next((line.split()[1] for line in lines if line.startswith("RssAnon")), "0")
            self.peak = max(self.peak, int(now) * 1024.0)
            if self._over.wait(0.01):
                return


def _forget(device: torch.device) -> None:
    """Give back what the case before and the floors took."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

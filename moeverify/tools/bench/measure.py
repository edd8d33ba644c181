"""Measurement of a case on every rank: trains some steps without golden and observation, as in production."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from moeverify.cases.flops import count_training_flops
from moeverify.cases.schema import Case, Recipe
from moeverify.errors import CaseError, Problem
from moeverify.parallel.meshes import build_meshes
from moeverify.parallel.regions.local_shard import buffers, parameters
from moeverify.results.measurement import Measurement, Operations, Roofline, Spread
from moeverify.tools.bench.operations import count_operations
from moeverify.tools.bench.profile import StepProfile, read_profile
from moeverify.tools.bench.roofline import measure_roofline, synchronize
from moeverify.train.assemble import assemble_parallel
from moeverify.train.data import MicroBatch
from moeverify.train.loop import make_batches, run_micro_batches
from moeverify.train.objective import count_valid
from moeverify.train.program import StepInputs, TrainingProgram
from moeverify.verification.compare.gather import gather_on_first


@dataclass(frozen=True)
class _Row:
    """The measurements of one rank. Units: seconds of each step, bytes."""

    seconds: list[float]
    peak_memory: float
    parameters: float
    roofline: Roofline
    profile: StepProfile
    operations: tuple[Operations | None, Operations | None]


def measure_case(
    case: Case,
    device: torch.device,
    folder: Path,
    *,
    warmup: int,
    steps: int,
    profile_folder: Path | None = None,
) -> Measurement | None:
    """Return the measurement of a training step on rank 0, and None on other ranks.

    Each rank saves the trace of one step as `rank-N.json.gz` in `profile_folder`, for Perfetto or Chrome.
    Collective: all ranks of the default process group, which must have as many ranks as the layout.

    Raises: CaseError when the recipe has a user's step function.
    """
    if case.recipe.step is not None:
        message = "this measures the built-in loop, not your own step"
        raise CaseError(
            [Problem(message, path="recipe.step", remedy="leave it out: `--set recipe.step=null`")]
        )
    roofline = measure_roofline(case, device)
    _forget(device)
    program = assemble_parallel(
        case.recipe, case.layout, build_meshes(case.layout, device.type), device, fill=fill_roughly
    )
    stepper = _Stepper(case, program)
    for _ in range(warmup):
        stepper.step()
    with PeakMemory(device) as memory:
        dist.barrier()
        seconds = time_steps(stepper.step, device, steps)
    profiled = _profile(stepper, device, profile_folder or folder)
    operations = stepper.count()
    stored = float(sum(shard.local().nbytes for shard in program.shards))
    rows = gather_on_first(_Row(seconds, memory.peak, stored, roofline, profiled, operations))
    return None if rows is None else _merge(case, rows, with_profile=profile_folder is not None)


@torch.no_grad()
def fill_roughly(model: nn.Module) -> None:
    """Fill this rank's tensors with numbers of a realistic size. Speed does not depend on the values."""
    for shard in [*parameters(model), *buffers(model)]:
        local = shard.local()
        if shard.name.endswith("norm.weight"):
            local.fill_(1.0)
        elif local.is_floating_point():
            local.normal_(0.0, 0.02)


class _Stepper:
    """Performs training steps in a loop over batches created in advance."""

    NUM_BATCHES = 4

    def __init__(self, case: Case, program: TrainingProgram) -> None:
        self._case = case
        self._program = program
        program.engine.begin(case.recipe.optimizer, program.shards, program.optimizer_implementation)
        self._batches: Sequence[Sequence[MicroBatch]] = [
            make_batches(case.recipe, program, step) for step in range(self.NUM_BATCHES)
        ]
        self._number = 0

    def step(self) -> None:
        take_step(self._case.recipe, self._program, self._next())

    def count(self) -> tuple[Operations | None, Operations | None]:
        """Perform a step and count the operations of its micro-batches and of the update.

        Return (None, None) for a compiled layout, which torch runs uncompiled while a mode counts. The same
        holds for a layout with CUDA graphs, whose kernels are not torch operations.
        """
        if self._case.layout.compile != "none" or self._program.run_captured is not None:
            return None, None
        recipe, program = self._case.recipe, self._program
        passes = count_operations(lambda: add_gradients(recipe, program, self._next()))
        return passes, count_operations(lambda: update(recipe, program))

    def _next(self) -> Sequence[MicroBatch]:
        self._number += 1
        return self._batches[(self._number - 1) % self.NUM_BATCHES]


def time_steps(step: Callable[[], object], device: torch.device, steps: int) -> list[float]:
    """Return the seconds of each step.

    On a GPU they are timed by events, so steps do not wait for each other.
    """
    synchronize(device)
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(steps):
            step()
            times.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(times)]
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(steps + 1)
    ]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def _profile(stepper: _Stepper, device: torch.device, folder: Path) -> StepProfile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    dist.barrier()
    with profile(activities=activities, record_shapes=True) as seen:
        stepper.step()
        synchronize(device)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{dist.get_rank()}.json.gz"
    seen.export_chrome_trace(str(path))
    return read_profile(path)


def _merge(case: Case, rows: Sequence[_Row], *, with_profile: bool) -> Measurement:
    """Return the measurement of a case: the slowest rank for each number, and rank 0 for traffic and work."""
    recipe, num_ranks = case.recipe, len(rows)
    step = Spread.of([max(of_step) for of_step in zip(*(row.seconds for row in rows), strict=True)])
    tokens = recipe.data.batch * recipe.data.seq_len
    flops = None
    if recipe.model.reference is not None:
        total = tokens * count_training_flops(recipe.model.reference, recipe.data.seq_len)
        flops = total / step.median / num_ranks
    exposed = [row.profile.exposed for row in rows if row.profile.exposed is not None]
    return Measurement(
        name=case.name,
        ranks=num_ranks,
        step=step,
        tokens_per_second=tokens / step.median,
        flops=flops,
        peak_memory=max(row.peak_memory for row in rows),
        parameters=max(row.parameters for row in rows),
        communication=max(row.profile.together for row in rows),
        exposed=max(exposed) if exposed else None,
        device=rows[0].profile.device,
        micro_batches=case.layout.micro_batches,
        in_micro_batches=rows[0].operations[0],
        in_update=rows[0].operations[1],
        traffic=rows[0].profile.traffic,
        work=rows[0].profile.work,
        profile=tuple(row.profile.step for row in rows) if with_profile else (),
        roofline=_find_slowest([row.roofline for row in rows]),
    )


def _find_slowest(found: Sequence[Roofline]) -> Roofline:
    experts = [each.experts for each in found if each.experts is not None]
    return Roofline(
        matmul=min(each.matmul for each in found),
        experts=min(experts) if experts else None,
        copying=min(each.copying for each in found if each.copying is not None),
        launch=max(each.launch for each in found if each.launch is not None),
        collectives={kind: min(each.collectives[kind] for each in found) for kind in found[0].collectives},
    )


class PeakMemory:
    """Context manager that measures this rank's peak memory: allocated on the GPU, or anonymous on the CPU.

    Units: bytes. Memory reserved for CUDA graphs counts as allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = 0.0

    def __enter__(self) -> PeakMemory:
        """Start the measurement."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return self
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Store the peak."""
        if self._device.type == "cuda":
            self.peak = float(torch.cuda.max_memory_allocated(self._device)) + _count_kept(self._device)
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


def _count_kept(device: torch.device) -> float:
    """Return the bytes reserved for CUDA graphs that hold no tensor between replays."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    own = torch.cuda.current_device() if device.index is None else device.index
    of_graphs = [each for each in segments if each["device"] == own and any(each["segment_pool_id"])]
    return float(sum(each["total_size"] - each["allocated_size"] for each in of_graphs))


def _forget(device: torch.device) -> None:
    """Free the memory of the previous case and of the roofline."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def take_step(recipe: Recipe, program: TrainingProgram, batches: Sequence[MicroBatch]) -> None:
    """Train on one global batch after `engine.begin`. Collective: all ranks of the layout."""
    add_gradients(recipe, program, batches)
    update(recipe, program)


def add_gradients(recipe: Recipe, program: TrainingProgram, batches: Sequence[MicroBatch]) -> None:
    """Run all micro-batches of a step forward and backward. Collective: all ranks of the layout."""
    normalizers = count_valid(batches, program.sums, recipe.data.batch)
    program.engine.zero_grad()
    for _ in run_micro_batches(StepInputs(recipe, program, batches, normalizers, step=0)):
        pass  # the results of a micro-batch are not used


def update(recipe: Recipe, program: TrainingProgram) -> None:
    """Complete and clip the gradients, and step the optimizer. Collective: all ranks of the layout."""
    program.finalize()
    if recipe.optimizer.clip_norm is not None:
        norm = program.measure_norm()
        program.engine.clip(program.shards, norm, recipe.optimizer.clip_norm)
    program.engine.step()

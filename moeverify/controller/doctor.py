"""Probes this machine and says what it means for verification. No torch in this process.

What needs torch runs on real ranks, one job a probe, so that a probe that crashes or hangs is a row of the
report and not its end.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

from moeverify.controller.machine import count_gpus, describe_environment, most_ranks
from moeverify.controller.scratch import scratch_folder
from moeverify.errors import MoeverifyError
from moeverify.launch.launcher import run_jobs
from moeverify.launch.plan import Device, Job, JobOutcome
from moeverify.results.probe import Probe, Status

ENTRY = "moeverify.worker.probes.main"
PROBE_TIMEOUTS: dict[Device, float] = {"cpu": 8.0, "cuda": 15.0}
TIME_LIMIT = 35.0
"""Seconds after which no further probe begins: with one that hangs the whole stays below a minute."""

# What `moeverify.worker.probes.main` can probe, by the name of the row, with the ranks that each needs.
CPU_PROBES: tuple[tuple[str, int], ...] = (
    ("gloo collectives", 2),
    ("gloo reduce_scatter AVG", 2),
    ("gloo uneven all_to_all", 2),
    ("gloo strided all_reduce", 2),
    ("gloo gradient layouts", 2),
    ("gloo reduce_scatter layouts", 2),
    ("gloo all_gather backward", 2),
    ("gloo PREMUL_SUM", 2),
    ("FSDP2 divide factor", 1),
    ("grouped_mm", 1),
    ("fused SGD on DTensor", 1),
    ("triton", 1),
    ("megablocks", 1),
)
GPU_PROBES: tuple[tuple[str, int], ...] = (("GPU", 1), ("NCCL version", 1), ("grouped_mm on CUDA", 1))
MULTI_GPU_PROBES: tuple[tuple[str, int], ...] = (
    ("GPU peer access", 2),
    ("nccl collectives", 2),
    ("nccl reduce_scatter AVG", 2),
    ("nccl uneven all_to_all", 2),
    ("nccl strided all_reduce", 2),
    ("nccl gradient layouts", 2),
    ("nccl reduce_scatter layouts", 2),
    ("nccl PREMUL_SUM", 2),
)


def examine() -> list[Probe]:
    """Return what this machine can do, within a minute."""
    deadline = time.monotonic() + TIME_LIMIT
    rows = [*_examine_host(), *_run_probes(CPU_PROBES, "cpu", deadline)]
    num_gpus = count_gpus()
    if num_gpus == 0:
        meaning = "cases run on the CPU with gloo: no verdict here is about NCCL or CUDA kernels"
        return [*rows, Probe("GPUs", "none", meaning, "warn")]
    probes = GPU_PROBES + (MULTI_GPU_PROBES if num_gpus > 1 else ())
    if num_gpus == 1:
        rows.append(Probe("GPUs", "1", "NCCL needs two: layouts are verified with --device cpu", "warn"))
    else:
        rows.append(Probe("GPUs", str(num_gpus), f"cases of up to {num_gpus} ranks run on CUDA with NCCL"))
    return [*rows, *_run_probes(probes, "cuda", deadline)]


def _examine_host() -> Iterator[Probe]:
    """Yield what is known without a rank."""
    environment = describe_environment("cpu")
    yield Probe("moeverify", environment["moeverify"], "")
    yield Probe("python", environment["python"], "")
    torch = environment["torch"]
    if torch == "not installed":
        yield Probe("torch", torch, "nothing can run; install torch 2.11 or later", "fail")
    else:
        yield Probe("torch", torch, "goldens are made anew for each version of torch")
    yield Probe("platform", platform.platform(), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    slow = "more ranks than cores take turns: slow, but right"
    yield Probe("cores", str(cores), slow, "ok" if cores > 1 else "warn")
    count, why = most_ranks("cpu")
    status: Status = "ok" if count >= 8 else "warn"
    yield Probe("ranks on the CPU", str(count), f"{why}; cases that need more are skipped", status)


def _run_probes(probes: Sequence[tuple[str, int]], device: Device, deadline: float) -> Iterator[Probe]:
    """Yield a row for each probe, whatever becomes of it."""
    jobs = [Job(name=name, num_ranks=num_ranks, timeout=PROBE_TIMEOUTS[device]) for name, num_ranks in probes]
    num_told = 0
    try:
        with (
            scratch_folder() as folder,
            closing(run_jobs(jobs, entry=ENTRY, folder=folder, device=device)) as outcomes,
        ):
            for outcome in outcomes:
                num_told += 1
                yield _read(outcome)
                if time.monotonic() > deadline:
                    break
    except (MoeverifyError, OSError) as error:
        name = jobs[num_told].name
        num_told += 1
        yield Probe(name, f"could not be probed: {error}", "cases will not start either", "fail")
    for job in jobs[num_told:]:
        yield Probe(job.name, "not probed: out of time", "this machine is busy; try again", "warn")


def _read(outcome: JobOutcome) -> Probe:
    """Return the row of a probe that ended, or of one that did not."""
    if outcome.state == "done" and outcome.result is not None:
        result = outcome.result
        return Probe(outcome.job, result["value"], result["meaning"], result["status"])
    what = {"hung": "hangs", "unstarted": "no ranks came up"}.get(outcome.state, "crashes")
    meaning = "a case that does the same will end so too"
    if outcome.state == "unstarted":
        meaning = "no case can run here"
    return Probe(outcome.job, f"{what}: {_shorten(outcome.summary)}", meaning, "fail")


def _shorten(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 160 else f"{line[:157]}..."

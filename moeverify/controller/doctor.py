"""Probes this machine. No torch in this process.

What needs torch runs on real ranks, one job a probe, so that a probe that crashes or hangs is a row of the
report and not its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from moeverify.controller.machine import count_gpus, describe_environment, find_limit
from moeverify.controller.scratch import scratch_folder
from moeverify.controller.tasks import make_job, read_outcome
from moeverify.errors import MoeverifyError
from moeverify.jobs import PROBE_WORKER, ProbeJob, ProbeResult
from moeverify.launch.launcher import run_jobs
from moeverify.launch.plan import Device, JobOutcome
from moeverify.report.words.failure import describe_failure
from moeverify.report.words.probe import word_answer, word_gpus, word_host, word_obstacle
from moeverify.results.probe import Answer, Outcome, Probe, ProbeRow

PROBE_TIMEOUTS: dict[Device, float] = {"cpu": 8.0, "cuda": 15.0}
"""Seconds of one probe, counted from where its ranks are up: one that hangs costs the others nothing."""


@dataclass(frozen=True)
class Try:
    """A probe on a kind of device, with the name of its row; `probe` may be one that only its worker knows."""

    name: str
    probe: str
    num_ranks: int

    @classmethod
    def of(cls, probe: Probe, prefix: str = "", suffix: str = "") -> Try:
        """Return the try of a probe, its row named after it."""
        return cls(f"{prefix}{probe.value}{suffix}", probe.value, probe.num_ranks)


_COLLECTIVES = [probe for probe in Probe if probe.is_collective]
CPU_TRIES = (
    *(Try.of(probe, "gloo ") for probe in _COLLECTIVES),
    *map(Try.of, (Probe.DIVIDE_FACTOR, Probe.GROUPED_MM, Probe.FUSED_SGD, Probe.TRITON, Probe.MEGABLOCKS)),
)
GPU_TRIES = (Try.of(Probe.GPU), Try.of(Probe.NCCL), Try.of(Probe.GROUPED_MM, suffix=" on CUDA"))
# The backward of all_gather is torch's own arithmetic around it, the same with every backend.
_ON_GPUS = [probe for probe in _COLLECTIVES if probe is not Probe.GATHER_BACKWARD]
MULTI_GPU_TRIES = (Try.of(Probe.PEER_ACCESS), *(Try.of(probe, "nccl ") for probe in _ON_GPUS))
SHARED_GPU_TRIES = tuple(Try.of(probe, "gloo ", " on a shared GPU") for probe in _ON_GPUS)


def list_gpu_tries(num_gpus: int) -> tuple[Try, ...]:
    """Return what is tried with so many GPUs: on one of them, ranks share it and gloo carries their collectives."""
    if num_gpus == 0:
        return ()
    return GPU_TRIES + (SHARED_GPU_TRIES if num_gpus == 1 else MULTI_GPU_TRIES)


def examine() -> list[ProbeRow]:
    """Return what this machine can do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rows = word_host(describe_environment("cpu"), cores, find_limit("cpu"))
    rows += run_probes(CPU_TRIES, "cpu")
    num_gpus = count_gpus()
    rows.append(word_gpus(num_gpus))
    rows += run_probes(list_gpu_tries(num_gpus), "cuda")
    return rows


def run_probes(tries: Sequence[Try], device: Device, entry: str = PROBE_WORKER) -> Iterator[ProbeRow]:
    """Yield a row for each probe, whatever becomes of it: each has processes and a time of its own."""
    timeout = PROBE_TIMEOUTS[device]
    for each in tries:
        job = make_job(each.name, each.num_ranks, timeout, ProbeJob(probe=each.probe))
        try:
            with (
                scratch_folder() as folder,
                closing(run_jobs([job], entry=entry, folder=folder, device=device)) as outcomes,
            ):
                (outcome,) = outcomes
        except (MoeverifyError, OSError) as error:
            yield word_obstacle(each.name, error)
        else:
            yield _make_row(each, _read(outcome))


def _make_row(asked: Try, answer: Answer) -> ProbeRow:
    known = asked.probe in set(Probe)
    return word_answer(asked.name, Probe(asked.probe) if known else None, answer)


def _read(outcome: JobOutcome) -> Answer:
    """Return the answer of a probe that ended, or of one that did not."""
    found = read_outcome(outcome, ProbeResult)
    if isinstance(found, ProbeResult):
        return found.answer
    how = {"hung": Outcome.HUNG, "unstarted": Outcome.UNSTARTED}.get(outcome.state, Outcome.CRASHED)
    return Answer(outcome=how, error=describe_failure(outcome.failure))

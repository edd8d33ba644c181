"""Probes this machine. No torch in this process.

What needs torch runs on real ranks, one job a probe, so that a probe that crashes or hangs is a row of the
report and not its end.
"""

from __future__ import annotations

import os
import time
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
TIME_LIMIT = 35.0
"""Seconds after which no further probe begins: with one that hangs the whole stays below a minute."""


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
MULTI_GPU_TRIES = (
    Try.of(Probe.PEER_ACCESS),
    # The backward of all_gather is torch's own arithmetic around it, the same with every backend.
    *(Try.of(probe, "nccl ") for probe in _COLLECTIVES if probe is not Probe.GATHER_BACKWARD),
)


def examine() -> list[ProbeRow]:
    """Return what this machine can do, within a minute."""
    deadline = time.monotonic() + TIME_LIMIT
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rows = word_host(describe_environment("cpu"), cores, find_limit("cpu"))
    rows += run_probes(CPU_TRIES, "cpu", deadline)
    num_gpus = count_gpus()
    rows.append(word_gpus(num_gpus))
    if num_gpus:
        rows += run_probes(GPU_TRIES + (MULTI_GPU_TRIES if num_gpus > 1 else ()), "cuda", deadline)
    return rows


def run_probes(
    tries: Sequence[Try], device: Device, deadline: float, entry: str = PROBE_WORKER
) -> Iterator[ProbeRow]:
    """Yield a row for each probe, whatever becomes of it."""
    timeout = PROBE_TIMEOUTS[device]
    jobs = [make_job(each.name, each.num_ranks, timeout, ProbeJob(probe=each.probe)) for each in tries]
    num_done = 0
    try:
        with (
            scratch_folder() as folder,
            closing(run_jobs(jobs, entry=entry, folder=folder, device=device)) as outcomes,
        ):
            for outcome in outcomes:
                num_done += 1
                yield _make_row(tries[num_done - 1], _read(outcome))
                if time.monotonic() > deadline:
                    break
    except (MoeverifyError, OSError) as error:
        yield word_obstacle(tries[num_done].name, error)
        num_done += 1
    for each in tries[num_done:]:
        yield _make_row(each, Answer(outcome=Outcome.NOT_TRIED))


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

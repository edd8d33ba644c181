"""Probes of this machine. Does not import torch in this process.

The probes that need torch run on real ranks, as the jobs of one launch. A probe that crashes or hangs is one
row of the report, and the others go on in a new launch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from moeverify.errors import MoeverifyError
from moeverify.report.words.failure import describe_failure
from moeverify.report.words.probe import word_answer, word_gpus, word_host, word_obstacle
from moeverify.results.probe import Answer, Probe, ProbeOutcome, ProbeRow
from moeverify.results.run import Event
from moeverify.verification.controller.installed import find_installed
from moeverify.verification.controller.machine import (
    count_cores,
    count_gpus,
    describe_environment,
    find_limit,
)
from moeverify.verification.controller.scratch import scratch_folder
from moeverify.verification.controller.tasks import make_job, read_outcome
from moeverify.verification.jobs import PROBE_WORKER, ProbeJob, ProbeResult
from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Device, JobOutcome, LaunchEvent

PROBE_TIMEOUTS: dict[Device, float] = {"cpu": 8.0, "cuda": 15.0}
"""Seconds per probe, counted from the time its ranks are up. A hanging probe is tried again after the others."""


@dataclass(frozen=True)
class Try:
    """A probe with the name of its row in the report. `probe` may be a name known only to its worker."""

    name: str
    probe: str
    num_ranks: int

    @classmethod
    def of(cls, probe: Probe, prefix: str = "", suffix: str = "") -> Try:
        """Return the try of a probe, with a row named after the probe."""
        return cls(f"{prefix}{probe.value}{suffix}", probe.value, probe.num_ranks)


_COLLECTIVES = [probe for probe in Probe if probe.is_collective]
CPU_TRIES = (
    *(Try.of(probe, "gloo ") for probe in _COLLECTIVES),
    *map(Try.of, (Probe.DIVIDE_FACTOR, Probe.GROUPED_MM, Probe.FUSED_SGD, Probe.TRITON, Probe.MEGABLOCKS)),
)
GPU_TRIES = (Try.of(Probe.GPU), Try.of(Probe.NCCL), Try.of(Probe.GROUPED_MM, suffix=" on CUDA"))
# The backward of all_gather is torch's own arithmetic around it and the same for every backend.
_ON_GPUS = [probe for probe in _COLLECTIVES if probe is not Probe.GATHER_BACKWARD]
MULTI_GPU_TRIES = (Try.of(Probe.PEER_ACCESS), *(Try.of(probe, "nccl ") for probe in _ON_GPUS))
SHARED_GPU_TRIES = tuple(Try.of(probe, "gloo ", " on a shared GPU") for probe in _ON_GPUS)


def list_gpu_tries(num_gpus: int) -> tuple[Try, ...]:
    """Return the probes for this number of GPUs. On a single GPU the ranks share it and use gloo."""
    if num_gpus == 0:
        return ()
    return GPU_TRIES + (SHARED_GPU_TRIES if num_gpus == 1 else MULTI_GPU_TRIES)


class Examination:
    """All probes of this machine.

    `names` holds the names of all rows in report order, and `rows` the rows known so far.
    """

    def __init__(self) -> None:
        cores = count_cores()
        num_gpus = count_gpus()
        self._tries: Mapping[Device, Sequence[Try]] = {"cpu": CPU_TRIES, "cuda": list_gpu_tries(num_gpus)}
        host = [*word_host(describe_environment("cpu"), cores, find_limit("cpu")), *find_installed()]
        gpus = word_gpus(num_gpus)
        self._found = {row.name: row for row in (*host, gpus)}
        on_cpu, on_gpus = ([each.name for each in self._tries[device]] for device in ("cpu", "cuda"))
        self.names = (*(row.name for row in host), *on_cpu, gpus.name, *on_gpus)

    @property
    def rows(self) -> list[ProbeRow]:
        """Return the known rows in the order of the report."""
        return [self._found[name] for name in self.names if name in self._found]

    @property
    def missing(self) -> list[str]:
        """Return the names of the rows that are not known yet."""
        return [name for name in self.names if name not in self._found]

    def run(self, on_event: Callable[[Event], None] = lambda event: None) -> None:
        """Run the probes that need ranks. Store and emit each row when it is known."""

        def emit(kind: Literal["case-start", "case-end"], name: str, row: ProbeRow | None = None) -> None:
            num_done, num_total = len(self.rows), len(self.names)
            on_event(Event(kind=kind, case=name, row=row, num_done=num_done, num_total=num_total))

        for device, tries in self._tries.items():
            with closing(run_probes(tries, device, on_start=lambda name: emit("case-start", name))) as rows:
                for row in rows:
                    self._found[row.name] = row
                    emit("case-end", row.name, row)


def run_probes(
    tries: Sequence[Try],
    device: Device,
    entry: str = PROBE_WORKER,
    *,
    on_start: Callable[[str], None] = lambda name: None,
) -> Generator[ProbeRow]:
    """Yield the row of each probe when it ends. `on_start` gets the name of each probe that begins.

    A probe that hangs is repeated once at the end with twice the timeout, because a busy machine may make it
    hang. Closing the iterator ends the running probe.
    """

    def watch(event: LaunchEvent) -> None:
        if event.kind == "start":
            on_start(event.job)

    left = {each.name: each for each in tries}
    with scratch_folder() as folder:
        for turn in (1, 2):
            asked = list(left.values())
            timeout = turn * PROBE_TIMEOUTS[device]
            jobs = [
                make_job(each.name, each.num_ranks, timeout, ProbeJob(probe=each.probe)) for each in asked
            ]
            outcomes = run_jobs(jobs, entry=entry, folder=folder / f"{turn}", device=device, on_event=watch)
            try:
                with closing(outcomes):
                    for outcome in outcomes:
                        if outcome.state != "hung" or turn == 2:
                            yield _make_row(left.pop(outcome.job), _read(outcome))
            except (MoeverifyError, OSError) as error:
                yield from (word_obstacle(name, error) for name in left)
                return


def _make_row(asked: Try, answer: Answer) -> ProbeRow:
    known = asked.probe in set(Probe)
    return word_answer(asked.name, Probe(asked.probe) if known else None, answer)


def _read(outcome: JobOutcome) -> Answer:
    """Return the answer of a probe, or how it failed."""
    found = read_outcome(outcome, ProbeResult)
    if isinstance(found, ProbeResult):
        return found.answer
    how = {"hung": ProbeOutcome.HUNG, "unstarted": ProbeOutcome.UNSTARTED}.get(
        outcome.state, ProbeOutcome.CRASHED
    )
    return Answer(outcome=how, error=describe_failure(outcome.failure))

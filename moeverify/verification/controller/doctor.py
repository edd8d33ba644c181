"""Probes of this machine. Does not import torch in this process.

Each probe that needs torch runs on real ranks in its own launch. A probe that crashes or hangs is therefore
one row of the report and does not end it. Launches run concurrently and share one import of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from moeverify.errors import MoeverifyError
from moeverify.report.words.failure import describe_failure
from moeverify.report.words.probe import word_answer, word_gpus, word_host, word_obstacle
from moeverify.results.probe import Answer, Probe, ProbeEvent, ProbeOutcome, ProbeRow
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
from moeverify.verification.launch.forked_agents import AgentServer
from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Device, JobOutcome

PROBE_TIMEOUTS: dict[Device, float] = {"cpu": 8.0, "cuda": 15.0}
"""Seconds per probe, counted from the time its ranks are up. A hanging probe does not delay the others."""
_MOST_AT_ONCE = 8
_AT_ONCE_ON_GPUS = 2  # a CUDA context takes half a GiB of GPU memory


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
        self._at_once: Mapping[Device, int] = {"cpu": min(cores, _MOST_AT_ONCE), "cuda": _AT_ONCE_ON_GPUS}
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

    def run(self, on_event: Callable[[ProbeEvent], None] = lambda event: None) -> None:
        """Run the probes that need ranks. Store and emit each row when it is known."""
        for device, tries in self._tries.items():
            with closing(run_probes(tries, device, at_once=self._at_once[device])) as events:
                for event in events:
                    if event.row is not None:
                        self._found[event.name] = event.row
                    on_event(event)


def run_probes(
    tries: Sequence[Try], device: Device, entry: str = PROBE_WORKER, *, at_once: int = 1
) -> Generator[ProbeEvent]:
    """Yield an event when a probe begins, and another with its row when it ends.

    `at_once` probes run together.

    Each probe has its own processes and timeout. A probe that hangs is repeated once at the end, alone and
    with twice the timeout, because a busy machine may make it hang. Closing the iterator ends the running
    probes.
    """
    if not tries:
        return
    told: SimpleQueue[tuple[Try, JobOutcome | Exception | None]] = SimpleQueue()
    # The contexts exit in reverse order: once the agents are gone, the threads have nothing left to wait
    # for.
    with scratch_folder() as folder, ThreadPoolExecutor(at_once) as pool, AgentServer() as agents:

        def probe(each: Try, timeout: float, folder: Path) -> None:
            told.put((each, None))
            job = make_job(each.name, each.num_ranks, timeout, ProbeJob(probe=each.probe))
            try:
                (outcome,) = run_jobs([job], entry=entry, folder=folder, device=device, start=agents.start)
                told.put((each, outcome))
            except Exception as error:
                told.put((each, error))

        timeout = PROBE_TIMEOUTS[device]
        for number, each in enumerate(tries):
            pool.submit(probe, each, timeout, folder / f"{number}")
        hung = []
        for _ in range(2 * len(tries)):
            each, end = told.get()
            if isinstance(end, JobOutcome) and end.state == "hung":
                hung.append(each)
            else:
                yield _make_event(each, end)
        for number, each in enumerate(hung):
            pool.submit(probe, each, 2 * timeout, folder / f"again-{number}")
            yield _make_event(*told.get())
            yield _make_event(*told.get())


def _make_event(asked: Try, end: JobOutcome | Exception | None) -> ProbeEvent:
    """Return the event of a probe that has started, or that has ended with `end`."""
    if end is None:
        return ProbeEvent(name=asked.name)
    if isinstance(end, JobOutcome):
        return ProbeEvent(name=asked.name, row=_make_row(asked, _read(end)))
    if isinstance(end, MoeverifyError | OSError):
        return ProbeEvent(name=asked.name, row=word_obstacle(asked.name, end))
    raise end


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

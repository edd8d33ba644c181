"""Probes this machine. No torch in this process.

What needs torch runs on real ranks, one launch a probe, so that a probe that crashes or hangs is a row of the
report and not its end. Launches run side by side, and share one import of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from moeverify.controller.machine import count_cores, count_gpus, describe_environment, find_limit
from moeverify.controller.scratch import scratch_folder
from moeverify.controller.tasks import make_job, read_outcome
from moeverify.errors import MoeverifyError
from moeverify.jobs import PROBE_WORKER, ProbeJob, ProbeResult
from moeverify.launch.forked_agents import AgentServer
from moeverify.launch.launcher import run_jobs
from moeverify.launch.plan import Device, JobOutcome
from moeverify.report.words.failure import describe_failure
from moeverify.report.words.probe import word_answer, word_gpus, word_host, word_obstacle
from moeverify.results.probe import Answer, Outcome, Probe, ProbeEvent, ProbeRow

PROBE_TIMEOUTS: dict[Device, float] = {"cpu": 8.0, "cuda": 15.0}
"""Seconds of one probe, counted from where its ranks are up: one that hangs costs the others nothing."""
_MOST_AT_ONCE = 8
_AT_ONCE_ON_GPUS = 2  # a context of CUDA takes half a GiB of a GPU, and small GPUs hold few


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


class Examination:
    """What is asked of this machine: `names` has all rows in the order of the report, `rows` those that are known."""

    def __init__(self) -> None:
        cores = count_cores()
        num_gpus = count_gpus()
        self._tries: Mapping[Device, Sequence[Try]] = {"cpu": CPU_TRIES, "cuda": list_gpu_tries(num_gpus)}
        self._at_once: Mapping[Device, int] = {"cpu": min(cores, _MOST_AT_ONCE), "cuda": _AT_ONCE_ON_GPUS}
        host = word_host(describe_environment("cpu"), cores, find_limit("cpu"))
        gpus = word_gpus(num_gpus)
        self._found = {row.name: row for row in (*host, gpus)}
        on_cpu, on_gpus = ([each.name for each in self._tries[device]] for device in ("cpu", "cuda"))
        self.names = (*(row.name for row in host), *on_cpu, gpus.name, *on_gpus)

    @property
    def rows(self) -> list[ProbeRow]:
        """Return the rows that are known, in the order of the report."""
        return [self._found[name] for name in self.names if name in self._found]

    @property
    def missing(self) -> list[str]:
        """Return the names of the rows that are not known."""
        return [name for name in self.names if name not in self._found]

    def run(self, on_event: Callable[[ProbeEvent], None] = lambda event: None) -> None:
        """Probe what is not known without a rank; each row is kept, and told, as soon as it is known."""
        for device, tries in self._tries.items():
            with closing(run_probes(tries, device, at_once=self._at_once[device])) as events:
                for event in events:
                    if event.row is not None:
                        self._found[event.name] = event.row
                    on_event(event)


def run_probes(
    tries: Sequence[Try], device: Device, entry: str = PROBE_WORKER, *, at_once: int = 1
) -> Generator[ProbeEvent]:
    """Yield when a probe begins, and its row as soon as it is known, whatever becomes of it; `at_once` run together.

    Each has processes and a time of its own. One that hangs is tried once more at the end, alone and with twice the
    time: a machine that is busy, with other probes too, must not make it hang. Closing the iterator ends what runs.
    """
    if not tries:
        return
    told: SimpleQueue[tuple[Try, JobOutcome | Exception | None]] = SimpleQueue()
    # Left from the last to the first: without an agent no thread has anything to wait for.
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
    """Return what is told of a probe: that it runs, or what became of it."""
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
    """Return the answer of a probe that ended, or of one that did not."""
    found = read_outcome(outcome, ProbeResult)
    if isinstance(found, ProbeResult):
        return found.answer
    how = {"hung": Outcome.HUNG, "unstarted": Outcome.UNSTARTED}.get(outcome.state, Outcome.CRASHED)
    return Answer(outcome=how, error=describe_failure(outcome.failure))

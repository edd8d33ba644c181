"""Tasks: jobs for the ranks, each with what is made of its outcome. No torch in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from moeverify.jobs import RankJob, RankResult, Refusal, VerifyJob, read_result, write_job
from moeverify.launch.backend import choose_external
from moeverify.launch.launcher import run_jobs
from moeverify.launch.plan import Backend, Device, Job, JobOutcome, LaunchEvent
from moeverify.launch.world import external_world

T = TypeVar("T")
A = TypeVar("A", bound=RankResult)


@dataclass(frozen=True)
class Task(Generic[T]):
    """A job, and the function that turns its outcome into what the caller wants to know."""

    job: Job
    judge: Callable[[JobOutcome], T]


_GRACE_SHARE = 2.0
"""Seconds that ranks get for each second of explaining: they also train again, and record that."""


def make_job(name: str, num_ranks: int, timeout: float, asked: RankJob) -> Job:
    """Return a job of a launch. Units: `timeout` in seconds."""
    grace = _GRACE_SHARE * asked.explain_seconds if isinstance(asked, VerifyJob) else 0.0
    return Job(
        name=name,
        num_ranks=num_ranks,
        timeout=timeout,
        payload=write_job(asked),
        grace=grace,
        keeps_meshes=isinstance(asked, VerifyJob) and asked.builds_all_meshes,
    )


def read_outcome(outcome: JobOutcome, wanted: type[A]) -> A | Refusal | None:
    """Return the answer of rank 0, or its refusal; None where the job failed."""
    if outcome.state != "done" or outcome.result is None:
        return None
    found = read_result(outcome.result)
    assert isinstance(found, wanted | Refusal)
    return found


def run_tasks(
    tasks: Sequence[Task[T]],
    *,
    entry: str,
    folder: Path,
    device: Device,
    backend: Backend = "auto",
    on_event: Callable[[LaunchEvent], None],
) -> Generator[T]:
    """Run the tasks in order on the ranks of a module, and yield what is made of each outcome as soon as it is known.

    Closing the iterator ends ranks of our own. Where another launcher has started this process, it is one of the
    ranks: then its first rank alone yields results, one for every task even if a rank is lost, and ends with the
    status of a failure whenever this process ends.
    """
    jobs = [task.job for task in tasks]
    if not jobs:
        return
    ran: Generator[JobOutcome]
    if external_world() is not None:
        from moeverify.launch.external import serve_external

        chosen = choose_external(backend)
        ran = serve_external(jobs, folder, entry, device=device, backend=chosen, on_event=on_event)
    else:
        ran = run_jobs(jobs, entry=entry, folder=folder, device=device, backend=backend, on_event=on_event)
    with closing(ran) as outcomes:
        for outcome in outcomes:
            yield _judge(tasks, outcome)


def _judge(tasks: Sequence[Task[T]], outcome: JobOutcome) -> T:
    return tasks[outcome.index].judge(outcome)

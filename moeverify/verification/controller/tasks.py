"""Tasks: jobs for the ranks, each with a function for its outcome. Does not import torch in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from moeverify.verification.jobs import RankJob, RankResult, Refusal, VerifyJob, read_result, write_job
from moeverify.verification.launch.backend import choose_external
from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Backend, Device, Job, JobOutcome, LaunchEvent
from moeverify.verification.launch.world import external_world

T = TypeVar("T")
A = TypeVar("A", bound=RankResult)


@dataclass(frozen=True)
class Task(Generic[T]):
    """A job, and the function that converts its outcome to a result."""

    job: Job
    judge: Callable[[JobOutcome], T]


# Grace in seconds per second of explaining: the ranks also train and record again.
_GRACE_SHARE = 2.0


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
    """Return the answer or refusal of rank 0, or None if the job failed."""
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
    timeout: float | None = None,
) -> Generator[T]:
    """Run the tasks in order and yield the result of each when it is known.

    `entry` is the module that the ranks run. `timeout` in seconds, the user's limit of a case, also raises the
    limit of the start. Closing the iterator ends the ranks that this process started.
    Under an external launcher, this process is one of the ranks. Only rank 0 then yields results, one per
    task even if a rank is lost; in that case the process exits with a failure status.
    """
    jobs = [task.job for task in tasks]
    if not jobs:
        return
    ran: Generator[JobOutcome]
    if external_world() is not None:
        from moeverify.verification.launch.external import serve_external

        chosen = choose_external(backend)
        ran = serve_external(jobs, folder, entry, device=device, backend=chosen, on_event=on_event)
    else:
        ran = run_jobs(
            jobs,
            entry=entry,
            folder=folder,
            device=device,
            backend=backend,
            on_event=on_event,
            start_limit=timeout or 0.0,
        )
    with closing(ran) as outcomes:
        for outcome in outcomes:
            yield _judge(tasks, outcome)


def _judge(tasks: Sequence[Task[T]], outcome: JobOutcome) -> T:
    return tasks[outcome.index].judge(outcome)

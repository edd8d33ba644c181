"""Runs jobs on ranks that it starts, and starts them anew when they die. No torch in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from moeverify.launch.monitor import LaunchMonitor, StartAgent, start_agent
from moeverify.launch.plan import Backend, Device, Job, JobOutcome, LaunchEvent, Plan


def run_jobs(
    jobs: Sequence[Job],
    *,
    entry: str,
    folder: Path,
    num_ranks: int | None = None,
    device: Device = "cpu",
    backend: Backend = "auto",
    on_event: Callable[[LaunchEvent], None] | None = None,
    start: StartAgent = start_agent,
) -> Generator[JobOutcome, None, None]:
    """Run the jobs in order, in as few launches as possible, and yield each outcome as soon as it is known.

    `entry` is a module (or a file, ending in .py) that calls `rank.serve(sys.argv[1], run_job)` when it runs
    as the main module. A launch has as many ranks as its jobs need, at most `num_ranks`. Everything is
    written below `folder`, which must hold no other run. Closing the iterator, or an exception while it
    waits (Ctrl-C), ends all ranks first; when this process dies, the kernel kills them. `start` starts the agent
    of each launch: see `AgentServer` for many launches.

    Raises: ValueError if a job needs more than `num_ranks` ranks.
    """
    folder = Path(folder).resolve()
    largest = max((job.num_ranks for job in jobs), default=0)
    if num_ranks is not None and largest > num_ranks:
        raise ValueError(f"a job needs {largest} ranks, and a launch may have {num_ranks}")
    watch = on_event if on_event is not None else _ignore
    first = launch = 0
    may_retry = True
    while first < len(jobs):
        launch += 1
        rest = tuple(jobs[first:])
        plan = Plan(
            jobs=rest,
            entry=entry,
            num_ranks=max(job.num_ranks for job in rest),
            device=device,
            backend=backend,
            folder=folder,
            launch_folder=folder / f"launch-{launch}",
            first=first,
            search_path=tuple(sys.path),
        )
        monitor = LaunchMonitor(plan, launch, watch, start)
        yield from monitor.follow()
        first += monitor.num_over
        if monitor.num_over:
            may_retry = True
        elif may_retry and monitor.worth_retrying:
            may_retry = False
        else:
            yield from monitor.give_up()
            return


def _ignore(event: LaunchEvent) -> None:
    """Take an event that nobody asked for."""

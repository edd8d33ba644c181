"""Execution of jobs on local ranks, with a new launch when ranks die. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import BinaryIO

from moeverify.verification.launch.monitor import Agent, LaunchMonitor, StartAgent, start_agent
from moeverify.verification.launch.plan import Backend, Device, Job, JobOutcome, LaunchEvent, LaunchPlan
from moeverify.verification.launch.warm import start_warm_agent


def run_jobs(
    jobs: Sequence[Job],
    *,
    entry: str,
    folder: Path,
    device: Device = "cpu",
    backend: Backend = "auto",
    on_event: Callable[[LaunchEvent], None] | None = None,
    start_limit: float = 0.0,
) -> Generator[JobOutcome, None, None]:
    """Run the jobs in order, in as few launches as possible, and yield each outcome as soon as it is known.

    `entry` is a module name, or a path that ends in `.py`. As the main module, it must call
    `rank.serve(sys.argv[1], run_job)`. A launch has as many ranks as its largest job needs. All files are
    written below `folder`, which must not contain another run. A warm server starts the agent of each launch, if one
    serves, and otherwise a new process.
    `start_limit` raises the limit until the ranks of a launch are up. Units: seconds.

    Closing the iterator ends all ranks, as does an exception such as KeyboardInterrupt while it waits. If
    this process is killed, the kernel kills the ranks.
    """
    folder = Path(folder).resolve()
    watch = on_event if on_event is not None else _ignore
    first = launch = 0
    may_retry = True
    while first < len(jobs):
        launch += 1
        rest = tuple(jobs[first:])
        plan = LaunchPlan(
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
        monitor = LaunchMonitor(plan, launch, watch, _start_quickest(device), start_limit=start_limit)
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
    """Ignore an event."""


def _start_quickest(device: Device) -> StartAgent:
    """Return a function that asks a warm server for the agent, and starts a process if none serves."""

    def start(plan: Path, log: BinaryIO) -> Agent:
        return start_warm_agent(plan, device, log) or start_agent(plan, log)

    return start

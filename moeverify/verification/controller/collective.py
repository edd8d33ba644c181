"""`moeverify comm`: one collective on real ranks, next to its definition. Does not import torch."""

from __future__ import annotations

from typing import Literal

from moeverify.errors import MachineError, RankFailure
from moeverify.report.words.failure import describe_failure
from moeverify.report.words.note import describe_obstacle
from moeverify.results.collective_name import CollectiveName
from moeverify.results.collective_run import CollectiveRun, RankOutput
from moeverify.results.obstacle import TooFewRanks
from moeverify.verification.collectives.definition import Sizes, define_transfer
from moeverify.verification.controller.machine import Machine
from moeverify.verification.controller.scratch import scratch_folder
from moeverify.verification.controller.tasks import Task, make_job, read_outcome, run_tasks
from moeverify.verification.jobs import COLLECTIVE_WORKER, CollectiveJob, CollectiveResult
from moeverify.verification.launch.plan import Backend, JobOutcome

TIMEOUT = 120.0
"""Timeout of the collective in seconds, including the creation of its group."""


def run_collective(
    collective: CollectiveName,
    sizes: Sizes,
    *,
    num_ranks: int,
    source: int,
    backward: bool,
    device: Literal["auto", "cpu", "cuda"],
    backend: Backend,
) -> CollectiveRun | None:
    """Return the inputs, expected outputs and actual outputs of each rank.

    Return None on ranks other than 0 of an external launch.

    Raises: MachineError when there are too few ranks or GPUs; RankFailure when a rank is lost.
    """
    machine = Machine.find(device, backend)
    if num_ranks > machine.limit.most:
        lacking = TooFewRanks(num_needed=num_ranks, limit=machine.limit)
        raise MachineError(f"this {describe_obstacle(lacking)}; use a smaller --world-size")
    transfer = define_transfer(collective, sizes, source)
    job = make_job(collective.value, num_ranks, TIMEOUT, CollectiveJob(transfer=transfer, backward=backward))
    with scratch_folder() as folder:
        found = list(
            run_tasks(
                [Task(job, _read_values)],
                entry=COLLECTIVE_WORKER,
                folder=folder,
                device=machine.device,
                backend=backend,
                on_event=lambda event: None,
            )
        )
    if not found:
        return None
    (values,) = found
    if isinstance(values, str):
        raise RankFailure(values)
    return CollectiveRun(transfer=transfer, values=values, environment=machine.describe([num_ranks]))


def _read_values(outcome: JobOutcome) -> tuple[RankOutput, ...] | str:
    """Return the values of each rank, or a message if the job failed."""
    answer = read_outcome(outcome, CollectiveResult)
    if isinstance(answer, CollectiveResult):
        return answer.values
    return f"{outcome.job}: {describe_failure(outcome.failure)}"
